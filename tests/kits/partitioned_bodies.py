"""What the ranks of tests/tensor/test_partitioned.py do: all with the same model, tokens and random state."""

import contextlib
import functools

import torch
from paper_kit import Llama
from tensor_kit import bodies, loss_of, tokens_of, whole
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from refimpl import memory
from refimpl.checkpointing import checkpoint, planned, recompute
from refimpl.mixed_precision import autocast
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import PartitionedInputs, sequence_parallel, tensor_parallel
from refimpl.tensor.partitioned import UnequalInputs

CONFIG = GPTConfig(vocab_size=64, context_length=64, layers=3, hidden=32, heads=4, dropout=0.1)
SHAPE = (3, 21)  # tokens
REGIONS = {"fp32": contextlib.nullcontext, "bf16": contextlib.nullcontext,
           "autocast": functools.partial(autocast, torch.bfloat16, "cpu"),
           "torch.autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16)}
partitioned = functools.partial(PartitionedInputs, smallest=0)


class Sliced(PartitionedInputs):
    """The mutant: right in every result, and its part is a view, so that the whole stays."""
    def _cut(self, flat):
        length = -(-flat.numel() // self.comm.world_size)
        assert length * self.comm.world_size == flat.numel()
        return flat.chunk(self.comm.world_size)[self.comm.rank]


def built(name, precision="fp32"):
    """(model, its blocks, tokens)."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, SHAPE, generator=torch.Generator().manual_seed(1))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if name == "llama":
        model = Llama().to(dtype)
        return model, list(model.inner.model.layers), tokens
    model = GPT(CONFIG, dtype=dtype)
    return model, list(model.blocks), tokens


def step(comm, name, precision, keep, plan=None):
    """(bytes kept above the start, traffic of the forward, of the backward, gradients); as planned, or all recomputed.
    """
    model, blocks, tokens = built(name, precision)
    comm.reset_traffic()
    with memory.track(model, tokens) as t:
        torch.manual_seed(7)
        with planned(model, plan, keep=keep) if plan else recompute(blocks, keep=keep), REGIONS[precision]():
            loss = model(tokens, tokens)
        kept, forward = t.now.total - t.start.total, comm.traffic
        loss.backward()
    return kept, forward, comm.traffic - forward, [p.grad for p in model.parameters()]


def held(comm, name, precision="fp32", make=partitioned, **options):
    """{what is to be known of a step with parts beside one with whole inputs}."""
    keep = make(comm, **options)
    whole, _, none, expected = step(comm, name, precision, None)
    kept, forward, backward, found = step(comm, name, precision, keep)
    return {"equal": all(map(torch.equal, found, expected)), "saved": whole - kept, "kept": kept,
            "forward": forward.total, "backward": backward, "none": none.total, "left": len(keep._parts)}


def nested(comm, plan):
    """(bytes saved, equal gradients)."""
    whole, *_, expected = step(comm, "gpt", "fp32", None, plan)
    kept, *_, found = step(comm, "gpt", "fp32", partitioned(comm), plan)
    return whole - kept, all(map(torch.equal, found, expected))


def inside_another(comm, outer):
    """Whether gradients are equal where another recomputation, without parts, is around one with them."""
    w = torch.randn(8, 8, requires_grad=True)
    around = {"ours": checkpoint, "torch's": functools.partial(torch_checkpoint, use_reentrant=False)}[outer]
    def gradients(keep):
        def inner(x, w):
            return (x @ w).tanh().sin()
        def body(x, w):
            return checkpoint(inner, checkpoint(inner, x, w, keep=keep), w, keep=keep).cos()
        return torch.autograd.grad(around(body, w.sin(), w).sum(), w)[0]
    return torch.equal(gradients(partitioned(comm)), gradients(None))


def unequal(comm, change, check=True):
    """Whether this rank noticed that rank 1 has another input."""
    x = torch.arange(4 * 256.0).view(4, 256)
    if comm.rank == 1:
        change(x)
    y = checkpoint(torch.sin, x.requires_grad_() * 1, keep=partitioned(comm, check=check))
    try:
        y.sum().backward()
    except UnequalInputs as error:
        return str(error)
    return ""


def interrupted(comm, when):
    """(parts that are left, equal gradients afterwards) of a function that fails once, in its first or second run."""
    keep, w, runs = partitioned(comm), torch.randn(8, 8, requires_grad=True), []
    def fn(x):
        runs.append(1)
        y = (x @ w).tanh()
        if len(runs) == when:
            raise ZeroDivisionError("once")
        return (y @ w).sin()
    def attempt():
        loss = checkpoint(fn, w.cos(), keep=keep).sum()
        try:
            return torch.autograd.grad(loss, w)[0]
        except ZeroDivisionError:
            return torch.autograd.grad(loss, w)[0]  # the graph is there still
    found = None
    with contextlib.suppress(ZeroDivisionError):
        found = attempt()
    if when == 1:
        assert found is None and len(keep._parts) == 0
        found = attempt()
    expected = torch.autograd.grad((((w.cos() @ w).tanh()) @ w).sin().sum(), w)[0]
    return len(keep._parts), torch.equal(found, expected)


def split_step(comm, name, tokens_too=False):
    """(bytes saved, bytes sent beyond those of whole inputs, equal gradients) of a model that is split; or what was
    said, where each rank has its own tokens between the split layers."""
    found = []
    for keep in (None, partitioned(comm)):
        model = whole(name)
        if not isinstance(model, GPT):
            model.config.use_cache = False  # a recomputation would append its keys a second time
        (sequence_parallel if tokens_too else tensor_parallel)(model, comm)
        tokens = tokens_of(model)
        comm.reset_traffic()
        with memory.track(model, tokens) as t:
            with recompute(list(bodies(model)), keep=keep):
                loss = loss_of(model, tokens)
            kept = t.now.total - t.start.total
            try:
                loss.backward()
            except UnequalInputs as error:
                return str(error)
        found.append((kept, comm.traffic.total, [p.grad for p in model.parameters()]))
    (whole_bytes, whole_sent, expected), (kept, sent, gradients) = found
    return whole_bytes - kept, sent - whole_sent, all(map(torch.equal, gradients, expected))
