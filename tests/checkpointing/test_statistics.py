"""BatchNorm's running averages move twice a step under recomputation, and once where they are frozen for the second."""

from functools import partial

import pytest
import torch
from torch import nn

from refimpl.checkpointing import checkpoint, frozen_statistics


def test_twice_without_and_once_with():
    def after_one_step(how):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        how(net, torch.randn(16, 4, requires_grad=True)).square().sum().backward()
        return net, [p.grad for p in net.parameters()]
    once, expected = after_one_step(lambda net, x: net(x))
    twice, gradients = after_one_step(checkpoint)
    cured, also = after_one_step(lambda net, x: checkpoint(net, x, recompute_context=partial(frozen_statistics, net)))
    assert all(map(torch.equal, gradients, expected)) and all(map(torch.equal, also, expected))
    assert [n[1].num_batches_tracked.item() for n in (once, twice, cured)] == [1, 2, 1]
    moved = once[1].running_mean  # from 0 by momentum · mean, then by as much of what is left
    torch.testing.assert_close(twice[1].running_mean, moved * (1 - 0.9**2) / 0.1)
    assert all(torch.equal(a, b) for a, b in zip(once.buffers(), cured.buffers(), strict=True))


def test_after_an_exception_the_averages_are_back():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ZeroDivisionError), frozen_statistics(norm):
        norm(torch.randn(4, 2))
        raise ZeroDivisionError
    assert norm.running_mean.tolist() == [0, 0] and norm.num_batches_tracked == 0
