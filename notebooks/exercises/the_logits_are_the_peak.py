"""Exercises of the page *The logits are the peak*."""

import torch
from torch.nn import functional as F

from refimpl import memory

from . import SCALAR, exercise


def head(N=96, C=16, V=2003, seed=0):
    """Make (hidden (N, C), weight (V, C), targets (N,)); a part of the targets, whole chunks of them, are −100."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator) * 0.3
    targets = torch.randint(V, (N,), generator=generator)
    targets[: N // 3] = -100
    targets[N // 2 :: 5] = -100
    return hidden, weight, targets


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(N, V, C, d, R)`, which returns a pair of bytes: the peaks of the plain head and of a chunked one.

    Weights and hidden states have d bytes a number, 4 or 2. Vectors of N and less do not count.
    """
    for N, V, C, d, R in ((8192, 50257, 768, 4, 256), (8192, 128256, 4096, 2, 512), (100, 5000, 64, 4, 10)):
        expected = 3 * N * V * 4, N * C * d + V * C * 4 + R * V * (4 if d == 4 else 6)
        said = tuple(predict(N, V, C, d, R))
        where = f"N={N:,}, V={V:,}, C={C:,}, {d} bytes, R={R}"
        if said[0] != expected[0]:
            return (f"{where}: you say {said[0]:,} with logits, {expected[0]:,} are there in backward: log-softmax"
                    ", its gradient and that of the logits, in fp32 whatever d is")
        if said[1] != expected[1]:
            return (f"{where}: you say {said[1]:,} in chunks, {expected[1]:,} is right: dh of all rows in d bytes, "
                    "dW in fp32, and R rows of logits in fp32, for 16 bits once more in d bytes")
    return None


@exercise("parity and bytes", SCALAR)
def second(rows):
    """Grade `rows(z, targets, smoothing)`, which returns the sum of some rows' losses and leaves their gradient in z.

    z is (R, V) in fp32: logits before, afterwards the gradient of the sum. A target of −100 counts for nothing. The
    losses are those of `F.cross_entropy(…, label_smoothing=smoothing)`.
    """
    hidden, weight, targets = head()
    expected = (hidden @ weight.T).requires_grad_()
    loss = F.cross_entropy(expected, targets, reduction="sum", label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, expected)
    z = expected.detach().clone()
    with memory.track(z, targets) as t:
        said = torch.as_tensor(rows(z, targets, 0.1))
    if not torch.allclose(said, loss.detach(), rtol=1e-4):
        return f"the losses add up to {loss.item():.3f}, yours to {said.item():.3f}"
    if not torch.allclose(z, gradient, atol=1e-5):
        where = "a row that is ignored" if z[targets == -100].any() else "a row that counts"
        return f"the loss is right, but z holds another gradient in {where}"
    took = t.peak.total - t.start.total
    return None if took < z.nbytes // 4 else f"right, but it took {took:,} bytes beside z, which has {z.nbytes:,}"


@exercise("parity and bytes", (SCALAR, torch.Tensor, torch.Tensor))
def third(step):
    """Grade `step(hidden, weight, targets, R, z_loss)`, which returns the mean loss and its gradients (loss, dh, dW).

    The loss of a row is cross-entropy + z_loss · logsumexp². It may hold R rows of logits at a time.
    """
    hidden, weight, targets = head()
    R, z_loss = 12, 0.05
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    logits, counts = wide[0] @ wide[1].T, targets != -100
    square = (logits.logsumexp(1) ** 2)[counts].mean()
    loss = F.cross_entropy(logits, targets) + z_loss * square
    exact = [loss.detach(), *torch.autograd.grad(loss, wide)]
    with memory.track(hidden, weight, targets) as t:
        said = step(hidden, weight, targets, R, z_loss)
    for name, a, b in zip(("loss", "dh", "dW"), said, exact, strict=True):
        if torch.as_tensor(a).shape != b.shape or not torch.allclose(torch.as_tensor(a).double(), b, atol=1e-5):
            ratio = (torch.as_tensor(a).double().norm() / b.norm()).item()
            return (f"{name} is another: {ratio:.3f} times the right one's norm (is the mean that of all rows that "
                    "count, and does the gradient have 1 + 2 · z_loss · logsumexp?)")
    took, whole = t.peak.total - t.start.total, 4 * len(hidden) * len(weight)
    return None if took < whole else f"right, but it took {took:,} bytes; the logits of all rows are {whole:,}"
