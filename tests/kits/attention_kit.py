"""What the tests of attention share, on a CPU and on a GPU: inputs, a rule, a meter, and what holds of every stage."""

import contextlib
import itertools
import math

import pytest
import torch

from refimpl import memory
from refimpl.attention import reference_attention
from refimpl.attention.call.philox import dropped
from refimpl.attention.scores import hook_of

# (T, S, options) of exactness, of which each stage takes some
SHAPES = [(1, 2, {}), (70, 70, {"causal": True}), (33, 130, {"causal": True, "window": 20}),
          (130, 33, {"causal": True}), (65, 97, {"window": 9}), (1, 200, {"causal": True})]


def inputs(B=2, H=4, G=2, T=7, S=9, D=8, dtype=torch.float32, requires_grad=True, seed=0, device="cpu", V=None):
    """q, k, v and a gradient for the output. V: head_dim of v, by default D."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, V or D), (B, H, T, V or D)
    q, k, v, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
                         for shape in shapes)
    return *(x.requires_grad_(requires_grad) for x in (q, k, v)), gradient


def in_the_interpreter():
    """(a mark of what needs Triton's interpreter, one for its warnings: 0/0 in a row whose every score is −∞, and
    ∞ − ∞, are as wanted)."""
    from refimpl.attention.triton_forward import forward_kernel  # where Triton is, on Linux
    interpreted = type(forward_kernel).__name__ == "InterpretedFunction"
    return [pytest.mark.skipif(not interpreted, reason="needs Triton's interpreter"),
            pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]


@contextlib.contextmanager
def memory_full_of_nan(warn_only=False):
    """What is handed out has NaN for values. warn_only: also where an operation is not deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def transposed(*tensors):
    """Each with the same values, in memory as a model has them: heads beside each other."""
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


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
    (B, H, _, D), hook, out = q.shape, hook_of(score), []
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    for row, key in zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True):
        T, S = row[1] - row[0], key[1] - key[0]
        away = torch.arange(T, device=q.device)[:, None] + S - T - torch.arange(S, device=q.device)
        mask = (away < 0) & causal | (away.abs() > (window if window is not None else T + S))
        fully_masked = mask.all(-1, keepdim=True)
        scores = q[:, :, slice(*row)] @ k[:, :, slice(*key)].mT * (D**-0.5 if scale is None else scale)
        if hook is not None:
            b, h, i, j = (torch.arange(n, device=q.device) for n in (B, H, T, S))
            scores = hook.forward(scores, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i[:, None] + S - T, j)
        scores = scores.masked_fill(mask & ~fully_masked, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(B, H, T, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :S]
        if dropout_p:
            drops = dropped(seed, dropout_p, B, H, row, key, q.device)
            weights = weights.masked_fill(drops, 0) * (1 / (1 - dropout_p))
        out.append((weights @ v[:, :, slice(*key)]).masked_fill(fully_masked, 0))
    return torch.cat(out, dim=2)


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


def read(attention, shapes, dtype, strided=False, **options):
    """(kept, peak) bytes above q, k, v and the output's gradient, by the tracker. strided: of tensors `transposed`."""
    (B, H, T, D), (_, G, S, _), *v_shape = shapes
    given = inputs(B, H, G, T, S, D, dtype, V=v_shape[0][3] if v_shape else D)
    q, k, v, gradient = transposed(*given) if strided else given
    with memory.track(q, k, v, gradient, *(x for x in (options.get("sinks"),) if x is not None)) as t:
        out = attention(*(x.requires_grad_() for x in (q, k, v)), **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    return kept, t.peak.total - t.start.total


def slope(attention, dtype=torch.float32, **options):
    """d log(peak) / d log(sequence), from 512 to 1,024 tokens."""
    short, long = (read(attention, ((1, 2, T, 64), (1, 1, T, 64)), dtype, causal=True, **options)[1]
                   for T in (512, 1024))
    return math.log2(long / short)


def assert_close(ours, expected, tolerance=1e-5):
    """Within `tolerance` of the largest value, for each of several tensors."""
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance * max(b.abs().max(), 1e-3), (a - b).abs().max()


def assert_as_reference(attention, close, given, **options):
    """Output and gradients, of `given`: q, k, v and a gradient."""
    close(*(gradients(f, *given, **options) for f in (attention, reference_attention)))


def assert_any_strides(attention, close, q, k, v, gradient):
    """Of the inputs, and of the gradient."""
    expected, (T, D) = gradients(attention, q, k, v, gradient, causal=True), q.shape[2:]
    strided = [x.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for x in (q, k, v)]
    turned = gradient.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    cut = gradient.repeat(1, 2, 2, 2)[:, ::2, :T, :D].copy_(gradient)
    for other in (turned, cut):
        assert not other.is_contiguous()
        close(gradients(attention, *strided, other, causal=True), expected)
    # the gradient of a sum has strides of 0
    close(*(torch.autograd.grad(f(q, k, v).sum(), q) for f in (attention, reference_attention)))


def assert_rows_that_see_nothing(attention, q, k, v, gradient):
    """The first T − S queries, under a causal mask: zeros and −∞, and no gradient whatever comes back to them."""
    n = q.shape[2] - k.shape[2]
    gradient[:, :, :n] = math.nan
    out, lse = attention(q, k, v, causal=True, return_logsumexp=True)
    assert (out[:, :, :n] == 0).all() and (lse[:, :, :n] == -math.inf).all() and lse[:, :, n:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), gradient)
    assert (dq[:, :, :n] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


def assert_not_finite_as_reference(attention, given, which, value, at, before):
    """NaN or infinity in row `at` of q, k or v: as in the reference, and none in rows before tiles that have it."""
    given[which][0, :, at, 1] = value
    ours, expected = (f(*given) for f in (attention, reference_attention))
    torch.testing.assert_close(ours, expected, equal_nan=True)
    ours, expected = (f(*given, causal=True) for f in (attention, reference_attention))
    torch.testing.assert_close(ours[:, :, at:], expected[:, :, at:], equal_nan=True)
    assert ours[:, :, :before].isfinite().all()  # tiles above the diagonal are not visited


def assert_nan_of_minus_infinity(attention):
    """A row whose every score is −∞ is NaN, and so are gradients, as in the reference."""
    q, k, v, gradient = inputs(1, 1, 1, 7, 7, 4)
    q.data[:, :, 4], k.data[:] = -math.inf, 1.0
    ours, expected = (gradients(f, q, k, v, gradient) for f in (attention, reference_attention))
    assert ours[0][0, 0, 4].isnan().all()
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, expected, strict=True))


def assert_dropout_follows_the_generator(attention, close, q, k, v):
    """Torch's; and backward draws the same mask."""
    torch.manual_seed(2)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(2)
    expected = reference_attention(q, k, v, dropout_p=0.5, seed=torch.randint(0, 2**63 - 1, ()))
    assert not torch.equal(first, second)
    close([first], [expected])
    torch.rand(5)  # the generator goes on before backward
    close(*(torch.autograd.grad(x.sum(), v) for x in (first, expected)))


def assert_same_bytes_strided_and_dry(attention, shapes, predicted, **options):
    """For any strides, and in a dry run, the predicted peak; with dropout, too, a dry run says that of a run."""
    given = (attention, shapes, torch.float32)
    for strided in (False, True):
        assert read(*given, strided, **options)[1] == predicted
        assert memory.dry_run(read, *given, strided, **options).result[1] == predicted
    dropping = options | {"dropout_p": 0.2}
    assert memory.dry_run(read, *given, **dropping).result == read(*given, **dropping)
