"""A checkpointed function is computed again in backward, when the region is over: in the same dtypes."""

import threading

import pytest
import torch
from precision_kit import Dtypes
from threads_kit import in_a_thread
from torch.utils.checkpoint import CheckpointError, checkpoint

from refimpl import common, memory
from refimpl.checkpointing import RecomputeError
from refimpl.checkpointing import checkpoint as own_checkpoint
from refimpl.mixed_precision import autocast, keep_precision
from refimpl.mixed_precision.internals import recompute


def loss_of(model, tokens, use_reentrant):
    """The model's loss, its blocks checkpointed (`None`: not)."""
    x = model.embedding(tokens) + model.positions(torch.arange(tokens.shape[1]))
    for block in model.blocks:
        x = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
    return torch.nn.functional.cross_entropy(model.head(model.norm(x)).float().flatten(0, 1), tokens.flatten())


def gradients(model, tokens, use_reentrant, region=autocast, backward=lambda loss: loss.backward()):
    model.zero_grad()
    with region():
        loss = loss_of(model, tokens, use_reentrant)
    backward(loss)
    return [p.grad.clone() for p in model.parameters()]


def in_another_region(loss):
    with autocast(torch.float16):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: in_a_thread(loss.backward)],
                         ids=["here", "in a thread"])
def test_recomputed_blocks_give_the_same_gradients(model, tokens, reentrant, backward):
    plain = gradients(model, tokens, None)
    for _ in range(2):
        again = gradients(model, tokens, reentrant, backward=backward)
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_runs_the_operations_of_the_forward(model, tokens, reentrant):
    with Dtypes() as record:
        gradients(model, tokens, reentrant)
    products = [line for line in record.forward if line[0] in ("aten::addmm", "aten::bmm")]
    again = [line for line in record.backward if line[0] in ("aten::addmm", "aten::bmm")]
    assert len(products) > 8 and all(dtype == "torch.bfloat16" for _, _, dtype in [*products, *again])
    for line in set(products) - {products[-1]}:
        assert line in again


def test_the_region_of_the_forward_counts_and_not_that_of_backward(model, tokens):
    plain, again = gradients(model, tokens, None), gradients(model, tokens, False, backward=in_another_region)
    close = [torch.allclose(one, other, atol=1e-2) for one, other in zip(plain, again, strict=True)]
    assert all(close)  # the rest of backward runs in float16 there
    disabled = gradients(model, tokens, False, region=lambda: autocast(enabled=False), backward=in_another_region)
    fp32 = gradients(model, tokens, None, region=lambda: autocast(enabled=False))
    assert all(torch.allclose(one, other, atol=1e-2) for one, other in zip(disabled, fp32, strict=True))


def test_without_the_wrappers_it_fails(model, tokens, monkeypatch):
    """The mutant: fp32 in backward is noticed by the one kind, and gives other gradients in the other."""
    plain = gradients(model, tokens, None)
    monkeypatch.setattr(recompute, "_install", lambda: None)
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(model, tokens, False)
    other = gradients(model, tokens, True)
    assert not all(torch.equal(one, another) for one, another in zip(plain, other, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_casts_of_a_recomputation_end_with_it(model, tokens, reentrant):
    gradients(model, tokens, reentrant)
    model.zero_grad()
    with memory.track(model, tokens) as t:
        with autocast():
            loss = loss_of(model, tokens, reentrant)
        loss.backward()
        del loss
        model.zero_grad()
    assert t.now.total == t.start.total


@pytest.mark.parametrize("cache", [False, True])
def test_a_recomputation_casts_as_often_as_the_region_it_began_in(cache):
    """And what it cached ends with it: every run casts anew."""
    weight, x = torch.nn.Parameter(torch.ones(8, 8)), torch.ones(2, 8, dtype=torch.bfloat16)
    with autocast(device_type="cpu", cache=cache):
        twice = keep_precision(lambda: (x @ weight) + (x @ weight))
        for _ in range(2):
            with Dtypes() as record:
                twice()
            assert len(record.casts) == (1 if cache else 2)
    with Dtypes() as record:
        twice()
    assert len(record.casts) == (1 if cache else 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exception_in_a_recomputation_leaves_nothing(reentrant):
    x, calls = torch.ones(2, 2, requires_grad=True), []
    def breaks_the_second_time(x):
        calls.append((x @ x).dtype)
        if len(calls) == 2:
            raise ZeroDivisionError
        return x @ x
    with autocast():
        y = checkpoint(breaks_the_second_time, x, use_reentrant=reentrant)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert calls == [torch.bfloat16] * 2 and (x @ x).dtype is torch.float32


def test_keep_precision_is_of_the_regions_that_are_open_when_it_is_called():
    def product(x):
        """Documented."""
        return (x @ x).dtype
    x = torch.ones(2, 2)
    with autocast():
        low = keep_precision(product)
        with autocast(enabled=False):
            high = keep_precision(product)
    with autocast(torch.float16):
        assert (low(x), high(x), product(x)) == (torch.bfloat16, torch.float32, torch.float16)
    assert (low(x), high(x), product(x)) == (torch.bfloat16, torch.float32, torch.float32)
    assert low.__doc__ == "Documented."
    assert keep_precision(torch.nn.Linear(2, 2))(x).dtype is torch.float32  # a module, which has no __name__


def test_wrappers_are_there_while_a_region_is_open_in_any_thread():
    before = torch.utils.checkpoint._CheckpointFrame.__init__
    inside, go_on, seen = threading.Event(), threading.Event(), []
    def other():
        with autocast():
            inside.set()
            go_on.wait()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with autocast():
        pass
    seen.append(torch.utils.checkpoint._CheckpointFrame.__init__ is before)
    go_on.set()
    thread.join()
    seen.append(torch.utils.checkpoint._CheckpointFrame.__init__ is before)
    assert seen == [False, True]


def test_the_checkpoint_of_this_project_recomputes_in_the_same_types():
    """Neither knows the other: both know `common.rerun`."""
    linear, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.ones(2, 8)
    weights = list(linear.parameters())
    with autocast(device_type="cpu"):
        plain = torch.autograd.grad(linear(x).sum(), weights)
        with autocast(device_type="cpu", enabled=False):
            high, fp32 = own_checkpoint(linear, x).sum(), linear(x).sum()
        low = own_checkpoint(linear, x).sum()
    outside = own_checkpoint(linear, x).sum()
    with autocast(device_type="cpu"):
        again, expected = torch.autograd.grad(low, weights), torch.autograd.grad(fp32, weights)
        for loss in (high, outside):
            assert all(map(torch.equal, torch.autograd.grad(loss, weights), expected))
    assert all(map(torch.equal, plain, again)) and (x @ x.T).dtype is torch.float32


def test_a_checkpoint_that_does_not_ask_notices_that_dtypes_differ(monkeypatch):
    linear, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.ones(2, 8)
    monkeypatch.setattr(common.rerun, "_registered", [])
    with autocast(device_type="cpu"):
        kept, alone = own_checkpoint(keep_precision(linear), x).sum(), own_checkpoint(linear, x).sum()
    kept.backward()
    with pytest.raises(RecomputeError, match="bfloat16"):
        alone.backward()
