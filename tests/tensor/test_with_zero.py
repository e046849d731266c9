"""Split models on engines: tensor × data parallelism on 4 ranks, recomputed or not, beside one process."""

import contextlib
import functools

import pytest
import torch
from rank_pool import pooled
from tensor_kit import SPLITS, block_of, bodies, loss_of, tokens_of, whole

from refimpl.checkpointing import recompute
from refimpl.mesh import Mesh
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

STEPS, MAX_NORM = 10, 0.3
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
STAGES = (DataParallel, Zero1, Zero2, Zero3)


def trained_alone(model):
    """Return (clipped norms, {name: parameter}) of one process with the whole batch."""
    optimizer, norms = ADAMW(model.parameters()), []
    for step in range(STEPS):
        loss_of(model, tokens_of(model, 4, 8, step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {key: p.detach() for key, p in model.named_parameters()}


@functools.cache
def alone(name, dtype):
    return trained_alone(whole(name, dtype))


def trained(comm, name, split, stage, recomputed, dtype, tp=2):
    """Return (clipped norms, the engine) of tensor × data parallelism."""
    mesh = Mesh(dp=comm.world_size // tp, tp=tp).connect(comm)
    model = SPLITS[split](whole(name, dtype), mesh.get_parallel_group("tp"))
    dp = mesh.get_parallel_group("dp")
    with recompute(bodies(model)) if recomputed else contextlib.nullcontext():
        engine, norms = stage(model, dp, ADAMW, world=comm), []
        for step in range(STEPS):
            tokens = tokens_of(model, 4, 8, step).chunk(dp.world_size)[dp.rank]
            engine.backward(engine(tokens, tokens.roll(-1, 1)))
            norms.append(engine.clip_grad_norm_(MAX_NORM).item())
            engine.step()
    return norms, engine


def distances(comm, name, split, stage, recomputed, dtype, expected_norms, expected):
    """Return the largest distances of norms and of parameters from one process."""
    norms, engine = trained(comm, name, split, stage, recomputed, dtype)
    far = []
    with engine.gathered() if stage is Zero3 else contextlib.nullcontext():
        for p in engine.model.parameters():
            wanted = block_of(expected[p.shard_spec.name], p.shard_spec)
            far.append(((p - wanted).abs().max() / max(1, wanted.abs().max())).item())
    return max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)), max(far)


@pytest.mark.parametrize(("split", "stage", "recomputed"), [
    (split, stage, (i + j) % 2 == 0) for i, split in enumerate(SPLITS) for j, stage in enumerate(STAGES)])
def test_ten_clipped_steps_are_those_of_one_process(split, stage, recomputed):
    how = split, stage, recomputed, torch.float64
    for norm, parameters in pooled(distances, 4, "gpt", *how, *alone("gpt", torch.float64)):
        assert norm <= 1e-6 and parameters <= 1e-9  # the norm that clips is an fp32 scalar


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["grouped gpt"])
def test_in_fp32_too(name, split):
    how = split, Zero3, True, torch.float32
    for norm, parameters in pooled(distances, 4, name, *how, *alone(name, torch.float32)):
        assert norm <= 1e-5 and parameters <= 1e-5


def in_16_bits(comm, split, stage, start, exact):
    """Return the distance of all parameters from those that one process trains in fp64, relative to what it changed."""
    _, engine = trained(comm, "gpt", split, stage, True, torch.bfloat16, 2 if comm.world_size == 4 else 1)
    far = moved = 0
    for pairs in engine.update.pieces.values():
        for piece, own in pairs:  # of the fp32 master
            spec = engine.specs[piece.slot.name]
            wanted, first = (block_of(each[spec.name], spec).flatten()[piece.first : piece.end]
                             for each in (exact, start))
            far, moved = far + (own.detach() - wanted).square().sum(), moved + (wanted - first).square().sum()
    return (far / moved).sqrt().item()


@functools.cache
def exactly():
    """Train one process in fp64 from the same values; return both."""
    start = {key: p.detach().double() for key, p in whole("gpt", torch.bfloat16).named_parameters()}
    model = whole("gpt", torch.float64)
    model.load_state_dict({**start, "head.weight": start["embedding.weight"]})
    return start, trained_alone(model)[1]


@pytest.mark.parametrize("stage", [Zero1, Zero2, Zero3])
@pytest.mark.parametrize("split", SPLITS)
def test_in_bf16_with_masters_no_farther_than_twice_one_process(split, stage):
    (one,) = pooled(in_16_bits, 1, split, stage, *exactly())
    assert all(0 < rank <= 2 * one for rank in pooled(in_16_bits, 4, split, stage, *exactly()))
