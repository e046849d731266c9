"""Exercises of the page *Sequence parallelism*."""

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.papers.tensor_parallel import Split

from . import close, exercise, launch, readable
from .asking import ANYTHING, Asked

HINTS = {
    "first": [
        "Count in bytes of x, which are 4 · tokens · hidden. The inputs of the norm and of the first layer take one "
        "each, those of GeLU and of the second layer four each: ten.",
        "Tensor parallelism cuts what has four times the features: 2 + 8/N are kept. With sequence parallelism all "
        "is cut: 10/N.",
        "A rank sends (N − 1)/N of x: four times in two all_reduces; with sequence parallelism in two collectives of "
        "forward and two of backward, and once more, to gather the input again."],
    "second": [
        "Begin with the page's `Column`. Cut the zeros off behind each gather: `comm.all_gather(x)[:tokens]`.",
        "`reduce_scatter` wants N equal parts, so append zeros before it: `torch.cat([dx, dx.new_zeros(-tokens % N, "
        "hidden)])`. `ctx` can hold an integer."],
    "third": [
        "`torch.randint(2**62, ())` is the same on all ranks, and the common stream goes on alike.",
        "Seed a `torch.Generator` with that number plus the rank, and draw `torch.rand(x.shape, generator=…)`.",
        "`mask = … >= p` is a tensor of bool, one byte a number. Return `x * mask / (1 - p)`: so autograd keeps the "
        "mask and no fp32 tensor."]}


def _half(tokens, hidden, world_size, by_tokens):
    """Return (bytes that a rank keeps for backward, bytes that it sends) of a norm and a split MLP, in fp32."""
    comm, width = FakeCommunicator(0, world_size), 4 * hidden
    up, down = nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False)
    half = Split(nn.LayerNorm(hidden), up, down, gelu, comm, [width], by_tokens)
    x = torch.ones(tokens // world_size if by_tokens else tokens, 1, hidden)
    with memory.track(half, x) as t:
        loss = half(x.requires_grad_() * 1).sum()
        kept = t.now["activations"] + t.now["communication"]
        loss.backward()
    return kept, comm.traffic.total


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(tokens, hidden, world_size, by_tokens)`, which returns (bytes that a rank keeps of half a layer
    for backward, bytes that it sends in forward and backward), in fp32 without dropout, within one percent."""
    for case in ((512, 256, 2, False), (512, 256, 4, False), (512, 256, 2, True), (1024, 128, 4, True)):
        tokens, hidden, world_size, by_tokens = case
        for what, said, read in zip(("keeps", "sends"), predict(*case), _half(*case), strict=True):
            if not abs(said - read) <= 0.01 * read:
                kind = "sequence" if by_tokens else "tensor"
                return (f"{tokens} tokens of {hidden} numbers, {world_size} ranks, {kind} parallel: you say "
                        f"{said:,.0f}, a rank {what} {read:,} bytes")
    return None


HIDDEN, FEATURES = 64, 32  # of a rank


def _given(tokens, world_size):
    """Return X (tokens, hidden), all ranks' weights and the gradients of their outputs."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in (
        (tokens, HIDDEN), (world_size, FEATURES, HIDDEN), (world_size, tokens, FEATURES))]


def _rows(x, world_size):
    """Cut (tokens, …) in as many equal parts; zeros fill the last ones."""
    missing = -len(x) % world_size
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).chunk(world_size)


def _column(comm, column, tokens):
    """Return (output, gradients of x and a, bytes kept between forward and backward, bytes sent) of one rank."""
    x, weights, d_outputs = _given(tokens, comm.world_size)
    x = _rows(x, comm.world_size)[comm.rank].clone().requires_grad_()
    a = weights[comm.rank].clone().requires_grad_()
    with memory.track(x, a) as t:
        y = column(comm, x, a, tokens)
        kept = t.now.total - t.start.total - y.nbytes
    if y.shape == d_outputs[comm.rank].shape and y.requires_grad:
        Asked(y.backward, ANYTHING)(d_outputs[comm.rank])  # runs what the reader has written
    found = [None if each is None or not readable(each) else each.detach() for each in (y, x.grad, a.grad)]
    return *found, kept, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def second(column):
    """Grade `column(comm, x, a, tokens)`: from this rank's rows x, (⌈tokens/N⌉, hidden), the last ones padded with
    zeros, to all tokens' features, (tokens, features): X aᵀ. It keeps nothing but x and a for backward."""
    for world_size, tokens in ((2, 7), (4, 21), (4, 5), (4, 8)):
        x, weights, d_outputs = _given(tokens, world_size)
        dx = _rows(sum(dy @ a for dy, a in zip(d_outputs, weights, strict=True)), world_size)
        for rank, result in enumerate(launch(_column, world_size, column, tokens, device="cpu")):
            y, x_grad, a_grad, kept, traffic = result
            where = f"rank {rank} of {world_size}, {tokens} tokens"
            expected = linear(x, weights[rank])
            if y is not None and y.shape != expected.shape:
                return f"{where}: the output is {tuple(y.shape)}, expected {tuple(expected.shape)}"
            if y is None or not close(y, expected):
                return f"{where}: the output is not X aᵀ"
            for name, mine, right in (("x", x_grad, dx[rank]), ("a", a_grad, d_outputs[rank].T @ x)):
                if mine is None:
                    return f"{where}: the output is right, but {name} gets no gradient"
                if not close(mine, right):
                    return f"{where}: the output is right, but not the gradient of {name}"
            if kept > 256:
                return (f"{where}: the gradients are right, but {kept:,} bytes more than x and a wait for "
                        "backward; it can gather again")
            sent = 3 * (world_size - 1) * dx[rank].nbytes  # ⌈tokens/N⌉ rows, to all others, three times
            if traffic != sent:
                return f"{where}: the gradients are right, but the rank sent {traffic:,} bytes; {sent:,} are enough"
    return None


def _x(comm):
    return torch.randn(48, 80, generator=torch.Generator().manual_seed(1 + comm.rank))


def _dropped(comm, dropout, p):
    """Return what one rank's dropouts gave: the first, its gradient, the next, and the first again when the common
    stream of random numbers was set back; the stream after the first; bytes kept; bytes sent."""
    torch.manual_seed(0)
    x, begin = _x(comm).requires_grad_(), torch.get_rng_state()
    with memory.track(x) as t:
        y = dropout(comm, x, p)
        kept = t.now.total - t.start.total - y.nbytes
    end = torch.get_rng_state()
    if y.requires_grad and readable(y):
        Asked(y.sum().backward, ANYTHING)()
    following = dropout(comm, x, p)
    torch.set_rng_state(begin)
    again = dropout(comm, x, p)
    found = [None if each is None or not readable(each) or each.shape != x.shape or each.dtype != x.dtype else
             each.detach() for each in (y, x.grad, following, again)]
    return x.detach(), *found, end, kept, comm.traffic.total


def _alike(a, b, p):
    """Tell whether two dropouts drop the same places more often than by chance."""
    return ((a != 0) == (b != 0)).float().mean().item() > p * p + (1 - p) ** 2 + 0.05


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(dropout):
    """Grade `dropout(comm, x, p)`: dropout of this rank's tokens. Ranks drop different places, the common stream of
    random numbers stays common, and the mask takes a byte an element."""
    for world_size, p in ((2, 0.4), (4, 0.1)):
        ranks = launch(_dropped, world_size, dropout, p, device="cpu")
        for rank, (x, y, gradient, following, again, end, kept, traffic) in enumerate(ranks):
            where = f"rank {rank} of {world_size}"
            if any(each is None for each in (y, following, again)):
                return f"{where}: expected a tensor of x's shape and dtype"
            survived = y != 0
            share = survived.float().mean().item()
            if not close(y, x * survived / (1 - p)) or abs(share - (1 - p)) > 0.04:
                return (f"{where}, p={p}: expected x / (1 - p) at {1 - p:.0%} of the places, else 0; you keep "
                        f"{share:.0%}, and the first number that you keep is multiplied by {_factor(y, x):.3f}")
            if gradient is None or not close(gradient, survived / (1 - p)):
                return f"{where}: the gradient does not have the mask of forward"
            if _alike(following, y, p):
                return f"{where}: two dropouts, one after the other, dropped the same places"
            if any(_alike(mine, other, p) for mine in (y, following) for each in ranks[:rank] for other in each[1:4:2]):
                return (f"{where} dropped the same places as another rank, in this dropout or the next: each needs a "
                        "mask of its own")
            if not torch.equal(end, ranks[0][5]):
                return f"{where}: afterwards the common stream is not the same as on rank 0"
            if not torch.equal(again, y):
                return (f"{where}: from the same state of the common stream, other places; recomputation would "
                        "compute another layer")
            if kept > y.numel() + 256:
                return (f"{where}: the masks are right, but {kept:,} bytes wait for backward; a byte an element is "
                        f"{y.numel():,}")
            if traffic:
                return f"{where}: the masks are right, but {traffic:,} bytes were sent; none are needed"
    return None


def _factor(y, x):
    """Return by what the first number that is not 0 was multiplied."""
    return next(iter((y / x)[y != 0].tolist()), 0.0)
