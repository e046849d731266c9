"""What the tests of attention share, on a CPU and on a GPU: attention pair by pair, inputs, a rule, and a meter."""

import math

import torch

from refimpl import memory
from refimpl.attention.call.philox import dropped
from refimpl.attention.scores import hook_of


def inputs(B=2, H=4, G=2, T=7, S=9, D=8, dtype=torch.float32, requires_grad=True, seed=0, device="cpu", V=None):
    """q, k, v and a gradient for the output. V: head_dim of v, by default D."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, V or D), (B, H, T, V or D)
    q, k, v, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
                         for shape in shapes)
    return *(x.requires_grad_(requires_grad) for x in (q, k, v)), gradient


def gradients(attention, q, k, v, gradient, **options):
    """(out, dq, dk, dv), and the gradient of `sinks`, if they are among the options."""
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v, *([options["sinks"]] if "sinks" in options else [])), gradient)


def pairwise(q, k, v, *, causal=False, window=None, scale=None, lengths=None, key_lengths=None):
    """The definition as loops over pairs that see each other, differentiable; lengths of packed sequences."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    scale, out = D**-0.5 if scale is None else scale, []
    sequences = list(zip(lengths or [T], key_lengths or lengths or [S], strict=True))
    for b in range(B):
        for h in range(H):
            row = key = 0
            for t, s in sequences:
                for i in range(t):
                    position = i + s - t
                    seen = [j for j in range(s) if (not causal or j <= position)
                            and (window is None or abs(position - j) <= window)]
                    keys = torch.tensor([key + j for j in seen], dtype=torch.int64)
                    scores = scale * (k[b, h * G // H, keys] @ q[b, h, row + i])
                    out.append(scores.softmax(0) @ v[b, h * G // H, keys] if seen else torch.zeros_like(q[b, h, 0]))
                row, key = row + t, key + s
    return torch.stack(out).view(B, H, T, D)


def plain(q, k, v, *, causal=False, window=None, scale=None, dropout_p=0.0, seed=None, cu_seqlens=None,
          cu_seqlens_k=None, score=None, sinks=None):
    """Attention as one writes it in PyTorch, all in the dtype of the inputs; queries that see nothing give zeros.
    `cu_seqlens`: lists. Dropout by the mask of the reference. `score`: a hook; not with packed sequences."""
    rows = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens
    keys = cu_seqlens_k or cu_seqlens or [0, k.shape[2]]
    spans = zip(zip(rows, rows[1:], strict=False), zip(keys, keys[1:], strict=False), strict=True)
    return torch.cat([_plain(q[:, :, slice(*row)], k[:, :, slice(*key)], v[:, :, slice(*key)], causal, window, scale,
                             dropped(seed, dropout_p, *q.shape[:2], row, key, q.device) if dropout_p else None,
                             1 / (1 - dropout_p), hook_of(score), sinks) for row, key in spans], dim=2)


def _plain(q, k, v, causal, window, scale, drops, dropout_scale, hook, sinks):
    (T, D), (H, S) = q.shape[2:], (q.shape[1], k.shape[2])
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    away = torch.arange(T, device=q.device)[:, None] + S - T - torch.arange(S, device=q.device)
    mask = (away < 0) & causal | (away.abs() > (window if window is not None else T + S))
    fully_masked = mask.all(-1, keepdim=True)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if hook is not None:
        b, h, row, key = (torch.arange(n, device=q.device) for n in (*q.shape[:2], T, S))
        scores = hook.forward(scores, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), row[:, None] + S - T, key)
    scores = scores.masked_fill(mask & ~fully_masked, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., :S]
    weights = weights if drops is None else weights.masked_fill(drops, 0) * dropout_scale
    return (weights @ v).masked_fill(fully_masked, 0)


def assert_as_exact_as_plain(attention, exact, q, k, v, gradient, plain=plain, **options):
    """The rule of the field: at most 2 times the error of plain PyTorch in the same dtype, 3 times for gradients, or
    one rounding of the largest value, all against `exact` in fp64. In fp32 1e-5 of the largest value: there P made
    again from a logsumexp carries the logsumexp's rounding, which P kept does not (read: up to 9 times plain's error in
    dQ for scores in the hundreds, where PyTorch's own flash kernel has 29)."""
    *wide, sinks = [x.detach().double().requires_grad_() for x in (q, k, v, options.get("sinks", q))]
    expected = gradients(exact, *wide, gradient.double(), **options | ({"sinks": sinks} if "sinks" in options else {}))
    ours, others = gradients(attention, q, k, v, gradient, **options), gradients(plain, q, k, v, gradient, **options)
    for e, a, b, factor in zip(expected, ours, others, (2, *[3] * (len(ours) - 1)), strict=True):
        error, theirs = ((x.double() - e).abs().max().item() for x in (a, b))
        largest = e.abs().max().item()
        bound = 1e-5 * largest if q.dtype == torch.float32 else max(factor * theirs, torch.finfo(q.dtype).eps * largest)
        assert error <= bound, (error, theirs, largest)


def read(attention, shapes, dtype, **options):
    """(kept, peak) bytes above q, k, v and the output's gradient, by the tracker."""
    (B, H, T, D), (_, G, S, _), *v_shape = shapes
    q, k, v, gradient = inputs(B, H, G, T, S, D, dtype, V=v_shape[0][3] if v_shape else D)
    with memory.track(q, k, v, gradient, *(x for x in (options.get("sinks"),) if x is not None)) as t:
        out = attention(q, k, v, **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    return kept, t.peak.total - t.start.total


def slope(attention, dtype=torch.float32, **options):
    """d log(peak) / d log(sequence), from 512 to 1,024 tokens."""
    short, long = (read(attention, ((1, 2, T, 64), (1, 1, T, 64)), dtype, causal=True, **options)[1]
                   for T in (512, 1024))
    return math.log2(long / short)
