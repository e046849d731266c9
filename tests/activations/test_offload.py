"""Offload: gradients bit for bit, nothing on the device in between, nothing at all on a CPU."""

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.activations import offload_activations
from refimpl.checkpointing import checkpoint, recompute


@pytest.mark.parametrize("depth", [0, 1, 2, 100])
@pytest.mark.parametrize("smallest", [0, 20_000])
def test_gradients_are_bit_equal(model, gradients, expected, lazy, depth, smallest):
    found = gradients(offload_activations(model, depth=depth, smallest=smallest, transfer=lazy))
    assert all(map(torch.equal, found, expected))
    sent, fetched = lazy.numbers("out"), lazy.numbers("in")
    assert sorted(fetched) == sent and len(sent) > 20, "each comes back once"


def test_they_come_back_nearly_in_reverse(model, gradients, lazy):
    """Inside one operation's backward autograd unpacks in an order of its own: neighbours may change places."""
    gradients(offload_activations(model, smallest=0, transfer=lazy))
    fetched = lazy.numbers("in")
    assert max(abs(place - (len(fetched) - 1 - number)) for place, number in enumerate(fetched)) <= 3


def test_parameters_inputs_and_small_things_stay(model, tokens, lazy):
    with offload_activations(model, smallest=20_000, transfer=lazy) as c:
        loss = model(tokens, tokens)
    owned = {tensor.data_ptr() for tensor in [*model.parameters(), tokens]}
    assert not owned & {source.data_ptr() for _, source in filter(None, lazy._queue)}
    assert c.report.after == {"left: smaller than 20,000 B": c.report.after.total}
    assert c.report.host == c.report.before["in host memory"] and loss.isfinite()
    assert all(host.nbytes >= 20_000 for host, _ in filter(None, lazy._queue))


def test_on_a_cpu_nothing_moves(model, gradients, expected):
    readings = []
    for context in (None, offload_activations(model, smallest=0)):
        with memory.measure("cpu") as m:
            found = gradients(context)
        readings.append((m.peak, m.net))
        assert all(map(torch.equal, found, expected))
    assert readings[0] == readings[1] and context.report.host == 0 and context.report.before == context.report.after
    assert "left: in host memory already" in str(context.report)


def test_a_storage_saved_by_several_operations_goes_once(lazy):
    x = torch.randn(64, 64, requires_grad=True)
    with offload_activations(nn.Linear(1, 1), smallest=0, transfer=lazy):
        y = x * 1
        loss = (y.sin() + y.cos() + y.t().sin()).sum()
    assert lazy.numbers("out") == [0]
    loss.backward()
    assert lazy.numbers("in") == [0] and torch.allclose(x.grad, 2 * x.detach().cos() - x.detach().sin())


def test_device_memory_between_forward_and_backward(model, tokens, lazy):
    """Nobody but the transfer's queue, which stands for the device here, holds an original."""
    with offload_activations(model, smallest=0, transfer=lazy) as c:
        loss = model(tokens, tokens)
    assert all(copy is None for copy in lazy._queue), "all have been waited for at the end of the region"
    assert c.report.held_elsewhere() == [] and c.report.after.total == 0 and loss.isfinite()


def test_a_region_that_ends_with_an_exception_lets_go(model, tokens, lazy):
    with pytest.raises(ZeroDivisionError), offload_activations(model, smallest=0, transfer=lazy, depth=100) as c:
        loss = model(tokens, tokens)
        _ = 1 / 0
    assert all(copy is None for copy in lazy._queue) and c.report.held_elsewhere() == [] and loss.isfinite()


def test_under_no_grad_nothing_is_saved(model, tokens, lazy):
    with torch.no_grad(), offload_activations(model, smallest=0, transfer=lazy):
        model(tokens, tokens)
    assert lazy.log == []


def test_around_a_checkpoint_the_inputs_of_regions_go(model, gradients, expected, lazy):
    with recompute(model.blocks):
        found = gradients(offload_activations(model, smallest=20_000, transfer=lazy))
    assert all(map(torch.equal, found, expected))
    assert 0 < len(lazy.numbers("out")) < 10, "a block's input, and what is outside the blocks"


def test_inside_a_checkpoint_the_innermost_hooks_win(lazy):
    """What the region would recompute goes to the host instead, and nothing is computed twice."""
    calls, linear = [], nn.Linear(64, 64)
    def fn(x):
        calls.append(1)
        with offload_activations(linear, smallest=0, transfer=lazy):
            return linear(x.sin()).cos()
    x = torch.randn(64, 64, requires_grad=True)
    checkpoint(fn, x).sum().backward()
    assert calls == [1] and len(lazy.numbers("out")) == 2
    assert torch.equal(x.grad, torch.autograd.grad(linear(x.sin()).cos().sum(), x)[0])


def test_two_regions_before_one_backward(model, tokens, lazy):
    """Micro-batches whose losses are added: each region has its own order."""
    model.eval()
    expected = torch.autograd.grad(model(tokens, tokens) + model(tokens[:1], tokens[:1]), list(model.parameters()))
    losses = []
    for part in (tokens, tokens[:1]):
        with offload_activations(model, smallest=0, transfer=lazy):
            losses.append(model(part, part))
    found = torch.autograd.grad(sum(losses), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_bad_depth(depth):
    with pytest.raises(ValueError, match=f"depth={depth!r}: expected an integer of at least 0, the storages copied"):
        offload_activations(nn.Linear(1, 1), depth=depth)


def test_bad_transfer():
    with pytest.raises(TypeError, match="transfer='cpu' has no method offloads: expected an object that makes the"):
        offload_activations(nn.Linear(1, 1), transfer="cpu")


def test_a_mutant_that_saves_nothing_is_seen(model, tokens, lazy, monkeypatch):
    """It sends copies and keeps the originals too."""
    kept, send = [], lazy.to_host
    monkeypatch.setattr(lazy, "to_host", lambda flat: kept.append(flat) or send(flat))
    with offload_activations(model, smallest=0, transfer=lazy) as c:
        loss = model(tokens, tokens)
    assert sum(nbytes for nbytes, _ in c.report.held_elsewhere()) == c.report.host
    assert "saved nothing" in str(c.report) and loss.isfinite()
