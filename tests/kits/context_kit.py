"""What tests of a split sequence share: q, k and v, whole and of a rank, and each way to attend to all of them."""

import functools

import torch
from rank_pool import pooled

from refimpl.attention import flash_attention, reference_attention, tiled_attention
from refimpl.context import gathered_attention, ring_attention, ulysses_attention
from refimpl.context.token_order import shard

B, H, T, D = 2, 4, 16, 8  # T: tokens of all ranks
HEADS = {"as many": 4, "grouped": 2, "one": 1}  # key heads
WAYS = {"ring, plain": (ring_attention, "plain"), "ring, zig-zag": (ring_attention, "zig-zag"),
        "gathered, plain": (gathered_attention, "plain"), "gathered, zig-zag": (gathered_attention, "zig-zag"),
        "ulysses": (ulysses_attention, "plain")}
INNER = {"reference": reference_attention, "tiled": tiled_attention, "flash": flash_attention}


def given(G=H, dtype=torch.float64, length=T, batch=B):
    """Return q, k, v and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, length, D, generator=generator, dtype=torch.float64).to(dtype)
            for heads in (H, G, G, H)]


def own(comm, order, tensors):
    """Return a rank's parts of tensors of the whole sequence."""
    return [shard(x, comm.rank, comm.world_size, order, 2) for x in tensors]


@functools.cache
def expected(G=H, causal=True, length=T, batch=B, **options):
    """Return output and gradients of attention of the whole sequence, in fp64."""
    q, k, v, d_out = given(G, length=length, batch=batch)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    out = reference_attention(*inputs, causal=causal, **options)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in inputs)]


def attend(comm, way, *qkv, **options):
    """Return attention of a rank's q, k and v by one of WAYS, or by another function with an order."""
    function, order = WAYS.get(way, way)
    return function(*qkv, comm, **options, **({} if function is ulysses_attention else {"order": order}))


def numbers(comm, way, G=H, causal=True, dtype=torch.float64, length=T, batch=B, **options):
    """Return the largest distances of (out, dq, dk, dv) of this rank from the whole, relative to their size."""
    order = WAYS.get(way, way)[1]
    *inputs, d_out = own(comm, order, given(G, dtype, length, batch))
    inputs = [x.requires_grad_() for x in inputs]
    inner = {"attention": INNER[options.pop("inner")]} if "inner" in options else {}
    out = attend(comm, way, *inputs, causal=causal, **options, **inner)
    out.backward(d_out)
    assert out.dtype == dtype and all(x.grad.dtype == dtype and x.grad.shape == x.shape for x in inputs)
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    whole = expected(G, causal, length, batch, **frozen)
    found = [out.detach(), *(x.grad for x in inputs)]
    return [((x.double() - mine).abs().max() / y.abs().max()).item()
            for x, mine, y in zip(found, own(comm, order, whole), whole, strict=True)]


def farthest(N, way, *args, **options):
    """Return the largest of all ranks' distances."""
    return max(max(rank) for rank in pooled(functools.partial(numbers, **options), N, way, *args))
