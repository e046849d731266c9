"""Numbers of plain PyTorch, bytes of the closed form, a version that saves nothing, bad input."""

import pytest
import torch

from refimpl import memory
from refimpl.NAME import plain_saved_bytes, saved_bytes, silu


def plain(x):
    """The mutant: the same numbers, and nothing is saved."""
    return x * torch.sigmoid(x)


def kept_bytes(function, shape, dtype):
    """Read the bytes that `function` keeps until backward, beside its output."""
    leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
    with memory.track(leaf) as t:
        y = function(leaf * 1)  # the input is a result that nobody but autograd may keep
        return t.now.total - t.start.total - y.nbytes


def test_numbers_are_the_plain_ones():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for function in (silu, plain):
        assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    assert torch.equal(silu(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_closed_form(dtype, function=silu):
    for shape in ((64,), (3, 5, 7), (128, 256)):
        assert kept_bytes(function, shape, dtype) == saved_bytes(shape, dtype)


def test_a_version_that_saves_nothing_fails():
    with pytest.raises(AssertionError):
        test_bytes_are_the_closed_form(torch.float32, plain)
    assert kept_bytes(plain, (8, 8), torch.float32) == plain_saved_bytes((8, 8), torch.float32)


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        assert kept_bytes(silu, (8, 8), torch.float32) == 0


def test_what_it_cannot_take_is_said():
    with pytest.raises(TypeError, match="x is of torch.int64: expected a floating dtype"):
        silu(torch.arange(3))
