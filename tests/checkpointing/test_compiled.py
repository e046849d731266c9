"""Recomputation inside of torch.compile: gradients of the uncompiled step, and fewer bytes kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from refimpl.checkpointing import (
    AdaptiveCheckpoint,
    DynamicCheckpoint,
    checkpoint,
    checkpoint_sequential,
    frozen_statistics,
    recompute,
    run_chain,
)
from refimpl.checkpointing import region as region_module

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 256), nn.Linear(256, 16), nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.down(nn.functional.gelu(self.up(x)))).tanh()


class Net(nn.Module):
    def __init__(self, dropout=0.0, run=None):
        super().__init__()
        self.blocks, self.run = nn.ModuleList(Block(dropout) for _ in range(2)), run

    def forward(self, x):
        if self.run is not None:
            return self.run(self.blocks, x).square().mean()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def each_in_a_region(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, scale=1.0, **options)
    return x


class Same:
    """A form of inputs that is the tensor's own."""

    def pack(self, tensor):
        return tensor.clone(), None

    def unpack(self, kept, context):
        return kept


RUNS = {  # called in the model's forward
    "checkpoint": each_in_a_region, "keep": partial(each_in_a_region, keep=Same()),
    "save": partial(each_in_a_region, save=[torch.ops.aten.addmm]),
    "run_chain": lambda blocks, x: run_chain(blocks, [(0,), (1,)], x),
    "checkpoint_sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x)}
POLICIES = {  # put on the model's blocks
    "recompute": recompute, "every second": lambda blocks: DynamicCheckpoint(blocks, interval=2),
    "adaptive": lambda blocks: AdaptiveCheckpoint(0.5, 1, used=lambda: 1).apply(blocks),
    "recompute_context": lambda blocks: recompute(blocks, recompute_context=partial(frozen_statistics, *blocks))}


def step(net, call, cast=False):
    """Gradients of a step of `call`, and the bytes of storages that autograd kept, parameters apart."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    net.zero_grad()
    x = torch.randn(64, 16, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, cast):
        loss = call(x)
    nbytes = sum(kept.values())
    loss.backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())], nbytes


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def compiled(request):
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(fallback_random=True):  # inductor's random numbers are the uncompiled ones
        yield partial(torch.compile, backend=request.param), request.param
    torch._dynamo.reset()


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("entry", [*RUNS, *POLICIES])
def test_gradients_are_those_of_the_uncompiled_step_and_less_is_kept(entry, dropout, cast, compiled):
    compiler, backend = compiled
    torch.manual_seed(0)
    net = Net(dropout)
    expected, whole = step(net, net, cast)
    net.run = RUNS.get(entry)
    with POLICIES.get(entry, lambda blocks: recompute([]))(net.blocks):
        found, kept = step(net, compiler(net), cast)
    exact = backend == "eager" or backend == "aot_eager" and not cast  # else kernels are fused, casts are moved
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if exact else (a - b).norm() <= (2e-2 if cast else 1e-5) * b.norm()
    one_of_two = entry in ("every second", "checkpoint_sequential")  # which never recomputes its last region
    assert kept < (0.85 if one_of_two else 0.5) * whole or entry == "save"


def test_a_region_that_recomputes_nothing_keeps_more(monkeypatch):
    """The measure sees it: with regions that are plain calls, the same step keeps what the plain one keeps."""
    torch._dynamo.reset()
    net = Net()
    whole = step(net, net)[1]
    monkeypatch.setattr(region_module.RecomputedRegion, "forward", lambda self, args, kwargs: self._fn(*args, **kwargs))
    with recompute(net.blocks):
        assert step(net, torch.compile(net, backend="aot_eager"))[1] >= 0.9 * whole
    torch._dynamo.reset()


@pytest.mark.parametrize("apply", [recompute, POLICIES["adaptive"]])
def test_a_graph_around_a_region_cannot_be_whole(apply):
    net = Net()
    with apply(net.blocks), pytest.raises(torch._dynamo.exc.Unsupported, match="outside_of_graph"):
        step(net, torch.compile(net, backend="eager", fullgraph=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_that_are_compiled_each_are_recomputed_outside(dropout, compiled):
    compiler, backend = compiled
    net = Net(dropout)
    expected, whole = step(net, net)
    layers = [compiler(block) for block in net.blocks]
    found, kept = step(net, lambda x: each_in_a_region(layers, x).square().mean())
    assert kept < 0.5 * whole
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if backend != "inductor" else (a - b).norm() <= 1e-5 * b.norm()
