"""The idea in one screen beside the hardened version: the same numbers."""

import pytest
import torch
from one_screen import check_paper

from refimpl.NAME import silu
from refimpl.papers import NAME as paper


def test_it_is_one_screen():
    check_paper("NAME", "NAME")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_numbers(dtype):
    torch.manual_seed(0)
    found = []
    x, dy = torch.randn(2, 5, 7).to(dtype)
    for function in (paper.silu, silu):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    assert all(map(torch.equal, *found))
