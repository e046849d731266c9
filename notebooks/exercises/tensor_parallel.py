"""Exercises of the page *Tensor parallelism*."""

import copy

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.comm.traffic import ring_traffic
from refimpl.model import GPT, Attention, GPTConfig, softmax_attention
from refimpl.tensor import tensor_parallel
from refimpl.tensor.closed_forms import split_block_terms

from . import exercise, launch, readable
from .asking import ANYTHING, Asked

HINTS = {
    "first": [
        "Queries and the output have hidden² weights each. Keys have `hidden * kv_heads / heads` features, and so have "
        "values. The MLP has three matrices of hidden · mlp_hidden.",
        "All of these are cut into N parts. The two norms, of hidden weights each, are whole on every rank.",
        "Attention and MLP send a sum of x each in forward and in backward: four all_reduces of "
        "4 · tokens · hidden bytes. Each of them sends 2 (N − 1)/N of that."],
    "second": [
        "Use `Columns` for `qkv` and `Rows` for `out`. But the rows of `qkv` are q, k, v, each of all heads.",
        "Sort these rows, and the bias alike: q, k and v of rank 0, then of rank 1, and so on. "
        "`torch.arange(3 * h).view(3, N, -1).transpose(0, 1).flatten()` is that order."],
    "third": [
        "First subtract each token's largest logit over all ranks, or eᶻ overflows: `comm.all_reduce(…, \"max\")`, of "
        "detached logits.",
        "The sum of eᶻ is one over ranks. So is the target's logit, if ranks that do not have it put 0.",
        "`Leave` adds up, and its backward is right. Rank r has the targets from r · v to (r + 1) · v, v being "
        "`logits.shape[1]`; `clamp` the others before `gather`."]}

LLAMA = {"vocab_size": 32, "context_length": 16, "layers": 1, "norm": "rmsnorm", "activation": "swiglu",
         "positions": "rotary", "bias": False}


def _block(world_size, tokens, **sizes):
    """Return (bytes of a block's weights on a rank, bytes that it sends in forward and backward)."""
    comm = FakeCommunicator(0, world_size)
    model = tensor_parallel(GPT(GPTConfig(**LLAMA, **sizes)), comm)
    x, block, before = torch.randn(1, tokens, sizes["hidden"], requires_grad=True), model.blocks[0], comm.traffic
    block(x, model.rotation(x)).sum().backward()
    return sum(p.nbytes for p in block.parameters()), (comm.traffic - before).total


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(hidden, mlp_hidden, heads, kv_heads, tokens, world_size)`, which returns (bytes of the weights of
    a LLaMA block on a rank, bytes that this rank sends in its forward and backward), in fp32."""
    for hidden, mlp_hidden, heads, kv_heads, tokens, N in (
            (32, 96, 4, 4, 8, 1), (32, 96, 4, 4, 8, 2), (32, 96, 8, 4, 16, 4), (64, 128, 8, 2, 8, 2)):
        held, sent = _block(N, tokens, hidden=hidden, mlp_hidden=mlp_hidden, heads=heads, kv_heads=kv_heads)
        said = predict(hidden, mlp_hidden, heads, kv_heads, tokens, N)
        asked = (f"hidden {hidden}, mlp_hidden {mlp_hidden}, {heads} heads, {kv_heads} key heads, {tokens} tokens, "
                 f"{N} ranks")
        if said[0] != held:
            return f"{asked}: you say {said[0]:,} bytes of weights, a rank holds {held:,}"
        if said[1] != sent:
            return f"{asked}: the weights are right; you say {said[1]:,} bytes are sent, a rank sends {sent:,}"
    return None


CONFIGS = {N: GPTConfig(vocab_size=32, context_length=16, layers=1, hidden=hidden, heads=heads)
           for N, hidden, heads in ((2, 64, 4), (4, 96, 8))}  # by the number of ranks
B, T, RATE = 2, 16, 0.1  # a batch, and the rate of one step of gradient descent


def _attention(world_size):
    """Return (attention, its input), the same on all ranks. The biases are not 0."""
    generator, config = torch.Generator().manual_seed(0), CONFIGS[world_size]
    attention = Attention(config, softmax_attention)
    for p in attention.parameters():
        p.data = 0.2 * torch.randn(p.shape, generator=generator)
    return attention, torch.randn(B, T, config.hidden, generator=generator).requires_grad_()


def _step(layer, x):
    """Return (output, gradient of x, output after one step of gradient descent)."""
    y = layer(x)
    Asked(y.square().mean().backward, ANYTHING)()  # runs what the reader has written
    with torch.no_grad():
        for p in layer.parameters():
            if p.grad is not None:
                p -= RATE * p.grad
        return y.detach(), x.grad, layer(x)


def _split(comm, split):
    """Return the numbers of `_step`, the bytes of weights and of what is kept for backward, and the bytes sent. The
    numbers are None if the output is not one of x's shape with a gradient."""
    attention, x = _attention(comm.world_size)
    layer = split(copy.deepcopy(attention), comm)
    forward = Asked(layer, torch.Tensor)
    with memory.track(layer, x) as t:
        y = forward(x)
        kept = t.now.total - t.start.total - y.nbytes
    if y.shape != x.shape or not y.requires_grad or not readable(y):
        return None, 0, 0, 0
    before = comm.traffic.total
    Asked(forward(x).sum().backward, ANYTHING)()
    sent = comm.traffic.total - before
    x.grad = None
    layer.zero_grad()
    return _step(layer, x), sum(p.nbytes for p in layer.parameters()), kept, sent


def _kept(world_size):
    """Predict the bytes that a rank keeps of attention for backward, besides x and the output."""
    terms = split_block_terms(CONFIGS[world_size], B, T, world_size, torch.float32)
    return sum(terms[name] for name in ("queries and keys", "values", "causal mask", "softmax output",
                                        "projection input"))


@exercise("parity and bytes", torch.nn.Module, process="ranks")
def second(split_attention):
    """Grade `split_attention(attention, comm)`, which returns a module: attention by this rank's heads, whose output
    is the whole one on every rank. Weights, and what is kept for backward, are 1/N; two all_reduces of x are sent."""
    for N in (2, 4):
        attention, x = _attention(N)
        expected, h = _step(attention, x), CONFIGS[N].hidden
        weights, sent = 4 * ((4 * h * h + 3 * h) // N + h), 2 * ring_traffic("all_reduce", x.nbytes, N, 0, 4)
        for rank, answer in enumerate(launch(_split, N, split_attention, device="cpu")):
            where, (numbers, held, kept, traffic) = f"rank {rank} of {N}", answer
            if numbers is None:
                return f"{where}: expected a module, which maps x (B, T, C) to (B, T, C) and gives it a gradient"
            y, dx, after = numbers
            if not _near(y, expected[0]):
                return (f"{where}: the output is not that of the whole attention. (In the rows of qkv all heads' "
                        "q come first, then all k, then all v: each of the three is cut. And a bias is added once)")
            if not _near(dx, expected[1]):
                return f"{where}: the output is right, but x has another gradient. (What is f for?)"
            if not _near(after, expected[2]):
                return f"{where}: after one step the output is another one, so a weight's gradient is wrong"
            if held > weights:
                return f"the numbers are right, but {where} has {held:,} bytes of weights; its part is {weights:,}"
            if kept > _kept(N):
                return (f"the numbers are right, but {where} keeps {kept:,} bytes for backward; of its own heads "
                        f"that is {_kept(N):,}")
            if traffic != sent:
                return (f"the numbers are right, but {where} sent {traffic:,} bytes; two all_reduces of x are "
                        f"{sent:,}")
    return None


V, TOKENS = 512, 24


def _logits():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(TOKENS, V, generator=generator)
    logits[0] += 200  # whose exp is infinite
    logits[1] -= 200  # whose exp is 0
    targets = torch.randint(V, (TOKENS,), generator=generator)
    edges = torch.arange(0, V, V // 4)  # the first columns of two ranks, and of four
    targets[-8:] = torch.cat([edges, edges + V // 4 - 1])
    return logits, targets


def _scored(comm, cross_entropy):
    """Return (loss, gradient of this rank's logits, bytes taken, bytes sent)."""
    logits, targets = _logits()
    mine = logits.chunk(comm.world_size, dim=1)[comm.rank].clone().requires_grad_()
    with memory.track(mine, targets) as t:
        loss = cross_entropy(comm, mine, targets)
        if loss.requires_grad and loss.numel() == 1 and readable(loss):
            Asked(loss.backward, ANYTHING)()
    gradient = mine.grad if mine.grad is not None and readable(mine.grad) else None
    loss = loss.detach() if readable(loss) else loss.new_empty(0)
    return loss, gradient, t.peak.total - t.start.total, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(cross_entropy):
    """Grade `cross_entropy(comm, logits, targets)`, which returns the mean cross-entropy on every rank. `logits` (N
    tokens, v) are this rank's columns; at most four numbers a token are exchanged."""
    whole, targets = _logits()
    expected = F.cross_entropy(whole.requires_grad_(), targets)
    expected.backward()
    for N in (2, 4):
        most = 4 * ring_traffic("all_reduce", 4 * TOKENS, N, 0, 4)
        gradients = whole.grad.chunk(N, dim=1)
        for rank, answer in enumerate(launch(_scored, N, cross_entropy, device="cpu")):
            loss, gradient, taken, sent = answer
            where, own = f"rank {rank} of {N}", 4 * TOKENS * V // N
            if loss.shape != () or loss.dtype != expected.dtype:
                return f"{where}: expected one number in fp32; you return {loss.dtype} of shape {tuple(loss.shape)}"
            if not _near(loss, expected.detach()):
                return f"{where}: the loss of all logits is {expected.item():.6f}; you return {loss.item():.6f}"
            if gradient is None:
                return f"{where}: the loss is right, but these logits have no gradient"
            if not _near(gradient, gradients[rank]):
                return f"{where}: the loss is right, but these logits have another gradient"
            if sent > most:
                return (f"the numbers are right, but {where} sent {sent:,} bytes; four numbers a token, each by an "
                        f"all_reduce, are {most:,}")
            if taken > 5 * own:
                return (f"the numbers are right, but {where} took {taken:,} bytes; five times its own logits are "
                        f"{5 * own:,}")
    return None


def _near(found, right):
    """Tell whether an fp32 tensor has the expected values, but for 1e-5 of their norm."""
    return found is not None and found.shape == right.shape and found.dtype == right.dtype and readable(found) and (
        (found - right).norm() <= 1e-5 * right.norm()).item()
