"""A head and its loss: inputs, the plain one, its numbers in fp64, and a meter."""

import torch
from torch.nn import functional as F

from refimpl import memory


def head(N, C, V, dtype=torch.float32, *, bias=False, ignored=0.2, seed=0, needs=True, scale=0.5):
    """(hidden (N, C), weight (V, C), targets (N,), bias (V,) or None)"""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, C, generator=g), torch.randn(V, C, generator=g) * scale
    targets = torch.randint(V, (N,), generator=g)
    targets[torch.rand(N, generator=g) < ignored] = -100
    offset = torch.randn(V, generator=g).to(dtype).requires_grad_(needs) if bias else None
    return hidden.to(dtype).requires_grad_(needs), weight.to(dtype).requires_grad_(needs), targets, offset


def plain(hidden, weight, targets, ignore_index=-100, bias=None, reduction="mean", *, label_smoothing=0.0, z_loss=0.0,
          softcap=None):
    """The loss from logits, as it is usually written; where no row counts, 0."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(1) ** 2)[targets != ignore_index].sum()
    return loss / (targets != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss


def with_gradients(loss, *tensors):
    """[loss, a gradient for each of the tensors that are not None]"""
    return [loss.detach(), *torch.autograd.grad(loss, [x for x in tensors if x is not None])]


def exact(hidden, weight, targets, bias=None, **options):
    """As `with_gradients(plain(…))`, in fp64 from the same numbers."""
    wide = [x if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    return with_gradients(plain(*wide[:2], targets, bias=wide[2], **options), *wide)


def errors(found, expected):
    """The largest error of each, relative to the largest number."""
    return [((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-300)).item()
            for a, b in zip(found, expected, strict=True)]


def read(compute, *given):
    """(bytes kept after forward, peak of forward, peak of all) above `given`, of `compute().backward()`."""
    given = [x for x in given if x is not None]
    for x in given:
        x.grad = None
    with memory.track(*given) as t:
        start = t.now.total
        loss = compute()
        kept, forward = t.now.total - start, t.peak.total - start
        loss.backward()
    return kept, forward, t.peak.total - start
