"""A head and its loss: inputs, the plain one, its numbers in fp64, and a meter."""

import torch
from torch.nn import functional as F

from refimpl import memory

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 4.0}


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


def sum_bound(hidden, weight, targets, roundings, bias=None, **options):
    """Elements of J · u · Σ_i |g_i| |h_i|: J roundings of a sum, one of g, one of the other sum in the end."""
    wide = [x if x is None else x.detach().double() for x in (hidden, weight, bias)]
    logits = F.linear(*wide).requires_grad_()
    g = exact(logits, torch.eye(len(weight), dtype=torch.float64), targets, **options)[1]
    kind = torch.finfo(weight.dtype)
    return (roundings + 2) * kind.eps / 2 * (g.abs().T @ wide[0].abs()) + kind.smallest_normal * kind.eps


def read(compute, *given, upstream=None):
    """(bytes kept after forward, peak of forward, peak of all) above `given`, of `compute().backward(upstream)`."""
    given = [x for x in given if x is not None]
    for x in given:
        x.grad = None
    with memory.track(*given) as t:
        start = t.now.total
        loss = compute()
        kept, forward = t.now.total - start, t.peak.total - start
        loss.backward(upstream)
    return kept, forward, t.peak.total - start


def peak_of(model, batch):
    """The peak of a step of a model of transformers."""
    model.zero_grad()
    with memory.track(model, *batch.values()) as t:
        model(**batch).loss.backward()
    return t.peak.total


def split_columns(comm, shape, dtype, parts, options, several):
    """Of `parts` losses of one head, (N, C, V), by `several`, a multi-token loss of columns on ranks, beside fp64:
    (errors of the last loss and of the gradients of hidden, weight and bias, bytes as `read`, traffic)."""
    hidden, weight, targets, bias = (x.detach().to(comm.device) for x in head(*shape, dtype, bias=True))
    targets = targets.masked_fill(targets == -100, options.get("ignore_index", -100))
    first, end = (rank * len(weight) // comm.world_size for rank in (comm.rank, comm.rank + 1))
    hiddens = [hidden.clone().requires_grad_() for _ in range(parts)]
    mine, b = (x[first:end].clone().requires_grad_() for x in (weight, bias))
    losses = []
    def compute():
        total, each = several(hiddens, mine, [targets] * parts, bias=b, comm=comm, vocabulary=len(weight), **options)
        losses.append(each[-1].item())
        return total

    comm.reset_traffic()
    taken = read(compute, *hiddens, mine, targets, b)
    expected = exact(hidden, weight, targets, bias, **{k: v for k, v in options.items() if k != "skip"})
    expected[2:] = [x[first:end] * parts for x in expected[2:]]
    found = [torch.tensor(losses[0], dtype=torch.float64), hiddens[-1].grad, mine.grad, b.grad]
    return errors(found, expected), taken, comm.traffic
