"""Exercises of the page *Three dimensions*."""

import functools
import math

import torch

from refimpl.engine import dry_rank
from refimpl.engine.closed_forms import wire_seconds
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.pipeline import partition
from refimpl.tensor import tensor_parallel

from . import SCALAR, exercise, launch

CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=4, hidden=32, heads=4, tied=False)
ROWS = 8


@functools.cache
def _sent(tp, dp, layers, micro_batches):
    """Return (x, parameters' bytes with padding, and what a rank of a middle stage sends over tp, pp and dp)."""
    config = GPTConfig(vocab_size=64, context_length=16, layers=4 * layers, hidden=32, heads=4, tied=False)
    mesh = Mesh(tp=tp, pp=4, dp=dp)
    found = dry_rank(functools.partial(GPT, config), mesh, mesh.rank_at(pp=1), ROWS, micro_batches=micro_batches,
                     style="uniform").traffic
    halves = found["dp"]["reduce_scatter"]
    x = ROWS // micro_batches * config.context_length * config.hidden * 4
    return x, halves * dp // (dp - 1), (found["tp"]["all_reduce"], found["pp"]["send"], 2 * halves)


@exercise("bytes", int)
def first(predict):
    """Grade `predict(x, parameters, layers, micro_batches, tp, dp)`: the bytes that a rank of a middle stage sends in a
    step over tp, pp and dp. `x`: bytes of a layer's input of one micro-batch; `parameters`: bytes of this rank's."""
    for tp, dp, layers, m in ((2, 2, 1, 4), (4, 2, 1, 8), (2, 4, 2, 4)):
        x, parameters, right = _sent(tp, dp, layers, m)
        said = predict(x, parameters, layers, m, tp, dp)
        if not isinstance(said, (tuple, list)) or len(said) != 3:
            return f"expected three numbers of bytes, over tp, pp and dp; you say {said!r}"
        for axis, mine, each in zip(("tp", "pp", "dp"), said, right, strict=True):
            if mine != each:
                return (f"tp {tp}, dp {dp}, {layers} layers, {m} micro-batches of {x:,} bytes: you say {mine:,.0f} "
                        f"over {axis}, a rank sends {each:,}")
    return None


def _gradients(model):
    """Give each parameter a gradient that its place in the whole decides."""
    for name, p in model.named_parameters():
        spec = getattr(p, "shard_spec", None)
        shape, key = (spec.shape, spec.name) if spec else (tuple(p.shape), name)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(key.encode())))
        p.grad = whole if spec is None else whole[tuple(
            slice(o, o + n) for o, n in zip(spec.offsets, spec.lengths, strict=True))].clone()
    return model


def _norm(comm, global_norm):
    """Return what the function says on a rank of a mesh of all ranks."""
    mesh = Mesh(tp=2, pp=comm.world_size // 2).connect(comm)
    torch.manual_seed(0)
    model = tensor_parallel(GPT(CONFIG), mesh.get_parallel_group("tp"))
    stage = _gradients(partition(model, mesh.pp)[mesh.here["pp"]])
    return global_norm(comm, list(stage.parameters()))


@exercise("parity and bytes", SCALAR, process="ranks")
def second(global_norm):
    """Grade `global_norm(comm, parameters)`: the norm of all gradients of a model that ranks of tp and pp share, a
    number. Each parameter has `.grad`, and `.shard_spec.replicas`: all ranks that hold the same, () for this one."""
    whole = torch.stack([p.grad.norm() for p in _gradients(GPT(CONFIG)).parameters()]).norm().item()
    for N in (2, 4):
        for rank, said in enumerate(launch(_norm, N, global_norm, device="cpu")):
            where = f"rank {rank} of {N}"
            if not isinstance(said, (int, float)) and not (isinstance(said, torch.Tensor) and said.numel() == 1):
                return f"{where}: expected one number; you say {said!r}"
            if not math.isclose(float(said), whole, rel_tol=1e-4):
                less = "less: other ranks have gradients, too" if said < whole else (
                    "more: what several ranks hold counts once")
                return f"{where}: you say {float(said):.3f}, the whole model's norm is {whole:.3f}. It is {less}"
    return None


@exercise("what is computed", dict)
def third(seconds):
    """Grade `seconds(traffic, mesh, per_node, inside, between)`: {axis: seconds} of rank 0, which sends `traffic`,
    {axis: bytes}. Nodes have `per_node` ranks, 0 … per_node − 1 the first; a group within one node sends `inside` bytes
    a second, another one `between`."""
    sent = {"tp": 6e9, "pp": 1e9, "dp": 2e9}
    for mesh, per_node in ((Mesh(tp=4, dp=2, pp=2), 4), (Mesh(tp=8, dp=2, pp=2), 4), (Mesh(tp=2, dp=4, pp=2), 8),
                           (Mesh(tp=2, dp=2, pp=4), 16)):
        said, right = seconds(dict(sent), mesh, per_node, 4e11, 5e10), wire_seconds(sent, mesh, 0, per_node, 4e11,
                                                                                    5e10)
        if not isinstance(said, dict) or said.keys() != right.keys():
            return f"expected {{axis: seconds}} of {', '.join(right)}; you say {said!r}"
        for axis, each in right.items():
            if not math.isclose(said[axis], each, rel_tol=1e-6):
                return (f"{mesh!r} on nodes of {per_node}: you say {said[axis]:.3f} s for {axis}, it takes "
                        f"{each:.3f}")
    return None
