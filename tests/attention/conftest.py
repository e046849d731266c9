"""What the tests of all stages share: attention pair by pair, inputs, and a meter."""

import attention_kit
import pytest


@pytest.fixture(scope="session")
def kit():
    """The functions of tests/kits/attention_kit.py, which tests/gpu has, too."""
    return attention_kit
