"""Tiny models in files, for all tests of estimates."""

import json

import pytest
from estimate_kit import write


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"))


@pytest.fixture
def written(tmp_path):
    """A function that writes a config.json and returns its path."""
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path / "config.json")
    return write
