"""Exercises of the page *The logits are the peak*."""

import math

import torch
from torch.nn import functional as F

from refimpl import memory

from . import SCALAR, close, exercise, readable
from .asking import Complaint

HINTS = {
    "first": [
        "With logits, three fp32 tensors of N·V numbers are there in backward: log-softmax, its gradient, and the "
        "gradient of the logits.",
        "In chunks, dh of all N rows has d bytes a number, and dW is summed in fp32.",
        "R rows of logits in fp32 come on top. With d = 2 the product of hidden and weight is in 16 bits first: "
        "add 2 bytes for each number of the chunk."],
    "second": [
        "Subtract each row's largest logit from z first. Then read the two terms that need logits: `gather` at "
        "`targets.clamp(min=0)`, and `z.mean(1)`.",
        "Turn z into softmax in place: `z.exp_()`, then divide each row by its sum. The logarithm of the sum is the "
        "loss's first term.",
        "Subtract smoothing / V everywhere and 1 - smoothing at the target. Rows whose target is -100 add no loss, and "
        "their gradient is 0."],
    "third": [
        "Divide by the number of all targets that count. A chunk has another number.",
        "The gradient of a row's logits is softmax · (1 + 2 · z_loss · L), minus 1 at the target.",
        "For each chunk: h @ weight.T, L, this gradient g in the memory of the logits, then dh of the chunk = "
        "g @ weight, and dW += g.T @ h."]}


def _head(N, seed=0, scale=1.0):
    """Return (hidden (N, C), weight (V, C), targets (N,)). Some targets are -100, among them all of the first third.
    A quarter of the rows is multiplied by `scale`: by 60, and exp of their logits is infinite in fp32."""
    generator, C, V = torch.Generator().manual_seed(seed), 16, 2003
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator) * 0.3
    targets = torch.randint(V, (N,), generator=generator)
    targets[: N // 3] = -100
    targets[N // 2 :: 5] = -100
    targets[-2:] = torch.tensor([0, V - 1])
    hidden[::4] *= scale
    return hidden, weight, targets


def _number(said):
    """Return the number that a SCALAR is."""
    if isinstance(said, torch.Tensor) and not readable(said):
        raise Complaint("the storage of the loss that you return was freed: return a loss that can be read")
    return float(said)


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(N, V, C, d, R)`, which returns a pair of bytes: the peaks of the plain head and of a chunked one.

    Weights and hidden states have d bytes a number, 4 or 2. Vectors of N and less do not count.
    """
    for N, V, C, d, R in ((8192, 50257, 768, 4, 256), (8192, 128256, 4096, 2, 512), (100, 5000, 64, 4, 10)):
        expected = 3 * N * V * 4, N * C * d + V * C * 4 + R * V * (4 if d == 4 else 6)
        said, where = predict(N, V, C, d, R), f"N={N:,}, V={V:,}, C={C:,}, {d} bytes, R={R}"
        if said[0] != expected[0]:
            return (f"{where}: you say {said[0]:,} bytes with logits, {expected[0]:,} are there in backward: "
                    "log-softmax, its gradient and that of the logits, in fp32 whatever d is")
        if said[1] != expected[1]:
            return (f"{where}: you say {said[1]:,} bytes in chunks, {expected[1]:,} is right: dh of all rows in d "
                    f"bytes {N * C * d:,}, dW in fp32 {V * C * 4:,}, R rows of logits in fp32 {R * V * 4:,}, and for "
                    "16 bits R rows once more in d bytes")
    return None


@exercise("parity and bytes", SCALAR)
def second(rows):
    """Grade `rows(z, targets, smoothing)`, which returns the sum of some rows' losses and leaves their gradient in z.

    z is (R, V) in fp32: logits before, afterwards the gradient of the sum. A target of −100 counts for nothing. The
    losses are those of `F.cross_entropy(…, label_smoothing=smoothing)`.
    """
    for seed, N, smoothing, scale in ((0, 96, 0.1, 60), (1, 70, 0.3, 1)):
        hidden, weight, targets = _head(N, seed, scale)
        z, given = hidden @ weight.T, targets.clone()
        wide = z.double().requires_grad_()
        loss = F.cross_entropy(wide, targets, reduction="sum", label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(loss, wide)
        with memory.track(z, given) as t:
            said = _number(rows(z, given, smoothing))
        where, loss = f"smoothing {smoothing}, logits of up to {wide.max():.0f}", loss.item()
        if not abs(said - loss) <= 1e-5 * loss:
            hint = " (is each row's largest logit subtracted before exp?)" if not math.isfinite(said) else ""
            return f"{where}: the losses add up to {loss:.3f}, yours to {said:.3f}{hint}"
        if not close(z, gradient.float()):
            ignored = targets == -100
            if not readable(z) or z.shape != gradient.shape or z.dtype != torch.float32:
                return f"{where}: the loss is right, but z is no longer a tensor in fp32 of its shape"
            which = "a row that is ignored" if z[ignored].any() else "a row that counts"
            return (f"{where}: the loss is right, but z holds another gradient in {which}: a number is off by "
                    f"{(z - gradient).abs().max():.1e}")
        if not torch.equal(given, targets):
            return "the loss and z are right, but your function changes `targets`, which others still need"
        took = t.peak.total - t.start.total
        if took >= z.nbytes // 4:
            return (f"{where}: right, but it took {took:,} bytes beside z, which has {z.nbytes:,}; less than a quarter "
                    "of these is needed")
    return None


@exercise("parity and bytes", (SCALAR, torch.Tensor, torch.Tensor))
def third(step):
    """Grade `step(hidden, weight, targets, R, z_loss)`, which returns the mean loss and its gradients (loss, dh, dW).

    The loss of a row is cross-entropy + z_loss · logsumexp². It may hold R rows of logits at a time, as autograd does:
    up to six tensors of these.
    """
    for seed, N, R, z_loss, scale in ((0, 250, 12, 0.01, 60), (1, 200, 9, 0.3, 1)):
        hidden, weight, targets = _head(N, seed, scale)
        wide = [x.double().requires_grad_() for x in (hidden, weight)]
        logits, counts = wide[0] @ wide[1].T, targets != -100
        exact = F.cross_entropy(logits, targets) + z_loss * (logits.logsumexp(1) ** 2)[counts].mean()
        gradients = torch.autograd.grad(exact, wide)
        with memory.track(hidden, weight, targets) as t:
            said = step(hidden, weight, targets, R, z_loss)
        where = f"{N} rows, R={R}, z_loss={z_loss}, logits of up to {logits.max():.0f}"
        loss, exact = _number(said[0]), exact.item()
        if not abs(loss - exact) <= 1e-5 * exact:
            return (f"{where}: the loss is {exact:.4f}, yours {loss:.4f}: is it the mean of all rows that count, with "
                    "logsumexp² of these rows alone?")
        for name, a, b in zip(("dh", "dW"), said[1:], gradients, strict=True):
            if a.shape != b.shape or a.dtype != torch.float32 or not readable(a):
                return (f"{where}: expected {name} in fp32 of shape {tuple(b.shape)}, yours is in {a.dtype} of shape "
                        f"{tuple(a.shape)}")
            if not close(a, b.float()):
                return (f"{where}: {name} is off by {(a - b).norm() / b.norm():.1e} of its norm (is the mean that of "
                        "all rows that count, and is softmax alone multiplied by 1 + 2 · z_loss · logsumexp?)")
        took, chunk = t.peak.total - t.start.total, 4 * R * len(weight)
        if took > 6 * chunk + 2 * (hidden.nbytes + weight.nbytes):
            return (f"{where}: right, but it took {took:,} bytes; R rows of logits are {chunk:,}, all {N} are "
                    f"{4 * N * len(weight):,}")
    return None
