"""Tiny models in files, for all tests of estimates."""

import pytest
from estimate_kit import write


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"))
