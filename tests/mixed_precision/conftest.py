"""Fixtures of mixed precision: variants of our GPT."""

import pytest
import torch
from precision_kit import CONFIGS, SHAPE

from refimpl.model import GPT, GPTConfig


@pytest.fixture(params=CONFIGS)
def gpt(request):
    """(model, tokens), the same at every call of a test, one for each variant."""
    torch.manual_seed(1)
    return GPT(GPTConfig(**CONFIGS[request.param])), torch.randint(0, 256, (2, 32))


@pytest.fixture
def model():
    """One variant."""
    torch.manual_seed(1)
    return GPT(GPTConfig(**SHAPE))


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (2, 32))
