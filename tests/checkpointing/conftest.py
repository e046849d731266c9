"""What tests of recomputation share: an input and a weight."""

import pytest
import torch


@pytest.fixture
def x():
    return torch.randn(16, 32, requires_grad=True)


@pytest.fixture
def w():
    return torch.randn(32, 32, requires_grad=True)


@pytest.fixture
def pair(x, w):
    return x, w
