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

from . import SCALAR, Complaint, exercise, launch, readable
from .asking import fault

HINTS = {
    "first": [
        "tp sends in every layer of every micro-batch, pp sends in every micro-batch, dp sends once in a step.",
        "A layer sums x four times over tp: twice in forward, twice in backward. A sum over t ranks sends 2(t − 1)/t "
        "of its tensor. It is so for the parameters over dp, too.",
        "A stage in the middle sends x to the next stage, and a gradient of as many bytes to the one before."],
    "second": [
        "Each rank sums the squares of its gradients. One all_reduce of that number adds the ranks' sums. The norm is "
        "its square root.",
        "What several ranks hold must count once. Let the first of them count it: `comm.rank == min(replicas)`.",
        "Where `replicas` is empty, this rank alone holds the parameter, and counts it: "
        "`min(replicas or (comm.rank,))` has both cases."],
    "third": [
        "`mesh.ranks(axis, rank=0)` has the ranks of the group, in ascending order. Rank r is on node r // per_node.",
        "Rank 0 is on node 0. So the group is within one node if its last rank is less than `per_node`. The size of "
        "the group does not say so: ranks of pp are far apart."]}

CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=4, hidden=32, heads=4, tied=False)
ROWS = 8
RULES = {"tp": "each layer sums x four times for each micro-batch, and a sum over t ranks sends 2(t-1)/t of it",
         "pp": "for each micro-batch x goes to the next stage, and its gradient to the one before",
         "dp": "gradients are summed once in a step, and a sum over d ranks sends 2(d-1)/d of them"}


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


@exercise("bytes", (int, int, int))
def first(predict):
    """Grade `predict(x, parameters, layers, micro_batches, tp, dp)`: the bytes that a rank of a middle stage sends in a
    step over tp, pp and dp. `x`: bytes of a layer's input of one micro-batch; `parameters`: bytes of this rank's."""
    for tp, dp, layers, m in ((2, 2, 1, 4), (4, 2, 1, 8), (2, 4, 2, 4)):
        x, parameters, right = _sent(tp, dp, layers, m)
        for axis, mine, each in zip(RULES, predict(x, parameters, layers, m, tp, dp), right, strict=True):
            if mine != each:
                return (f"tp {tp}, dp {dp}, {layers} layer{'s' * (layers > 1)}, {m} micro-batches of {x:,} bytes, "
                        f"parameters of {parameters:,} bytes: you say {mine:,} over {axis}, a rank sends {each:,}; "
                        f"{RULES[axis]}")
    return None


def _gradients(model):
    """Give each parameter a gradient that its place in the whole decides. Those of vectors are large, to count."""
    for name, p in model.named_parameters():
        spec = getattr(p, "shard_spec", None)
        shape, key = (spec.shape, spec.name) if spec else (tuple(p.shape), name)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(key.encode())))
        whole *= 10 if len(shape) == 1 else 1
        p.grad = whole if spec is None else whole[tuple(
            slice(o, o + n) for o, n in zip(spec.offsets, spec.lengths, strict=True))].clone()
    return model


def _norm(comm, global_norm):
    """Return what the function says on a rank of a mesh of all ranks; bytes that it sends, of a number for each tensor
    to each rank, and of all gradients here."""
    mesh = Mesh(tp=2, pp=comm.world_size // 2).connect(comm)
    torch.manual_seed(0)
    model = tensor_parallel(GPT(CONFIG), mesh.get_parallel_group("tp"))
    parameters = list(_gradients(partition(model, mesh.pp)[mesh.here["pp"]]).parameters())
    before, sent = [p.grad.clone() for p in parameters], comm.traffic.total
    said = global_norm(comm, list(parameters))
    if isinstance(said, torch.Tensor) and not readable(said):
        raise Complaint("the storage of the norm was freed")
    if not all(p.grad is not None and torch.equal(p.grad, each) for p, each in zip(parameters, before, strict=True)):
        raise Complaint("your function changes the gradients: the optimizer needs them")
    return float(said), comm.traffic.total - sent, 8 * comm.world_size * len(parameters)


@exercise("parity and bytes", SCALAR, process="ranks")
def second(global_norm):
    """Grade `global_norm(comm, parameters)`: the norm of all gradients of a model that ranks of tp and pp share, a
    number. Each parameter has `.grad`, and `.shard_spec.replicas`: all ranks that hold the same, () for this one. Ranks
    send numbers, not gradients."""
    whole = torch.stack([p.grad.norm() for p in _gradients(GPT(CONFIG)).parameters()]).norm().item()
    for N in (2, 4):
        for rank, (said, sent, most) in enumerate(launch(_norm, N, global_norm, device="cpu")):
            if not math.isclose(said, whole, rel_tol=1e-4):
                return (f"rank {rank} of {N}: you say {said:.3f}, the whole model's norm is {whole:.3f}"
                        f"{_why(said, whole)}")
            if sent > most:
                return (f"the norm is right, but rank {rank} of {N} sent {sent:,} bytes; a number for each tensor and "
                        f"rank is at most {most:,}")
    return None


def _why(said, whole):
    if math.isclose(said, whole**2, rel_tol=1e-4):
        return ": that is its square"
    if said < whole:
        return ". It is less: the squares of all ranks are summed, and each gradient counts on some rank"
    if said > whole:
        return ". It is more: what several ranks hold counts once, and squares are summed, not norms"
    return ""


@exercise("seconds", dict)
def third(seconds):
    """Grade `seconds(traffic, mesh, per_node, inside, between)`: {axis: seconds} of rank 0, which sends `traffic`,
    {axis: bytes}. Nodes have `per_node` ranks, 0 … per_node − 1 the first; a group within one node sends `inside` bytes
    a second, another one `between`."""
    for case, (mesh, per_node) in enumerate(((Mesh(tp=4, dp=2, pp=2), 4), (Mesh(tp=8, dp=2, pp=2), 4),
                                             (Mesh(tp=2, dp=4, pp=2), 8), (Mesh(tp=2, dp=2, pp=4), 16),
                                             (Mesh(tp=4, dp=2, pp=2), 5)), 1):
        sent, speeds = {"tp": 6e9 * case, "pp": 1e9, "dp": 2e9 * case}, (4e11 / case, 5e10)
        said, right = seconds(dict(sent), mesh, per_node, *speeds), wire_seconds(sent, mesh, 0, per_node, *speeds)
        if said.keys() != right.keys():
            return f"expected {{axis: seconds}} of {', '.join(right)}; you say {said!r}"
        for axis, each in right.items():
            if wrong := fault(said[axis], float):
                return f"the seconds of {axis}: {wrong}"
            if not math.isclose(said[axis], each, rel_tol=1e-6):
                ranks = mesh.ranks(axis, rank=0)
                nodes = ", ".join(str(rank // per_node) for rank in ranks)
                return (f"{mesh!r} on nodes of {per_node}: you say {said[axis]:.8g} s for {axis}, it takes {each:.8g}; "
                        f"its ranks {', '.join(map(str, ranks))} are on the nodes {nodes}")
    return None
