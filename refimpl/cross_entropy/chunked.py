"""The head's loss without its logits: hidden states times weight, softmax and cross-entropy, some tokens at a time.

The logits of N tokens and a vocabulary of V are N · V numbers, and their gradient as many. Nobody reads them but the
loss. A chunk of R tokens has all that its own loss and gradient need, so both are computed at once, in forward:

    for each chunk of R rows:   z = h Wᵀ + b                  (R, V), the same memory for every chunk
                                loss += Σ loss(z, t)           z becomes its gradient g, in place (see `rows`)
                                dh = g W     dW += gᵀ h     db += Σ g
    in backward:                dh, dW and db, times the gradient of the loss

This is as many matrix products as with the logits, three. Computing the chunks again in backward would take four, and
have the same peak: dh and dW are as large there, and all of the model's activations are still kept.

"Liger Kernel" (Hsu et al. 2024), section 3.2, computes gradients in forward; "Cut Your Losses in Large-Vocabulary
Language Models" (Wijmans et al. 2024) has no chunks of logits at all (see `triton_forward`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .call import check_call, flat, refuse_second_derivative, sum_dtype
from .rows import Terms, VocabularyColumns, part_factors, row_losses
from .weight_gradient import WeightSum, scaled

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


@torch._disable_dynamo
def chunked_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                                 ignore_index: int = -100, bias: torch.Tensor | None = None, reduction: str = "mean", *,
                                 label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                                 chunk_size: int | None = None, comm: "Communicator | None" = None,
                                 vocabulary: int | None = None,
                                 weight_gradient: torch.dtype | None = None) -> torch.Tensor:
    """Return `F.cross_entropy((hidden @ weight.T + bias).float(), targets, …)`, a scalar in fp32, without the logits.

    - `hidden` (…, C), `weight` (V, C), `bias` (V,) or None: in fp64, fp32, bf16 or fp16, all the same. Under autocast
      hidden and weight are cast to its dtype. The loss is computed in fp32 (fp64 for fp64).
    - `targets` (…): ids in int64 or int32; rows whose target is `ignore_index` do not count.
    - `reduction`: "mean" divides by the number of rows that count, "sum" does not. Where no row counts the loss is 0
      and all gradients are 0; torch's mean is NaN there.
    - `label_smoothing` ε, `z_loss` λ, `softcap`: terms of the loss (see `rows`). Both ε and λ are averaged, too.
    - `chunk_size`: rows at a time; by default `default_chunk_size`. The last chunk may be shorter.
    - `comm`, `vocabulary`: a Communicator whose ranks split the vocabulary, and its whole size V. Then `weight` and
      `bias` are rows rank·V//n … (rank+1)·V//n − 1; hidden and targets are the same on all ranks, and so are the loss
      and the gradient of hidden. Each chunk has two all_reduces of a few numbers per row; backward sends nothing.

    - `weight_gradient`: the dtype in which the weight's gradient is summed: by default fp32 (fp64 for fp64), rounded
      once, to the weight's dtype; or the weight's own. In 16 bits the sum takes half the bytes, and each of J chunks
      rounds it: |ΔdW| ≤ J · u · Σ_i |g_i| |h_i|, u = 2⁻⁸ for bf16, 2⁻¹¹ for fp16, whose sums may also be too large.

    `chunked_cross_entropy_bytes` gives the bytes. Gradients are computed in forward if grad mode is on and an input
    requires them.

    Raises ValueError for shapes and options, TypeError for dtypes, IndexError on a CPU for a target outside 0 … V − 1
    (on a GPU an assertion fails), CollectiveMismatch if ranks have different targets, and RuntimeError for
    `create_graph=True` or a second backward.
    """
    loss, _ = multi_token_cross_entropy([hidden], weight, [targets], None, ignore_index, bias, reduction,
                                        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
                                        chunk_size=chunk_size, comm=comm, vocabulary=vocabulary,
                                        weight_gradient=weight_gradient)
    return loss


@torch._disable_dynamo
def multi_token_cross_entropy(hiddens: Sequence[torch.Tensor], weight: torch.Tensor,
                              targets: torch.Tensor | Sequence[torch.Tensor], scales: Any = None,
                              ignore_index: int = -100, bias: torch.Tensor | None = None, reduction: str = "mean", *,
                              label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                              chunk_size: int | None = None, comm: "Communicator | None" = None,
                              vocabulary: int | None = None,
                              weight_gradient: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Σ_k scales[k] · loss_k, losses (K,) without a graph): K losses of one head, with one gradient of W.

    Multi-token prediction has one hidden state for each token ahead: `hiddens`, K tensors (…, C), and `targets`, K
    tensors. K calls of `chunked_linear_cross_entropy` would hold K gradients of the weight, V · C each in fp32; here
    there is one. `scales`: K numbers, by default 1 each. Options, errors and the rest are those of
    `chunked_linear_cross_entropy`; each mean is over its own targets.

    "Better & Faster Large Language Models via Multi-token Prediction" (Gloeckle et al. 2024), section 2.
    """
    scales = [1.0] * len(hiddens) if scales is None else [float(scale) for scale in scales]
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    columns = VocabularyColumns.of(comm, len(weight), vocabulary)
    hiddens = check_call(hiddens, weight, targets, scales, bias, reduction, chunk_size, terms, columns)
    sums = sum_dtype(weight_gradient, weight, hiddens[0].dtype)
    targets = [flat(each) for each in targets]
    N = max(map(len, targets))
    rows = max(1, min(N, chunk_size or default_chunk_size(N, *weight.shape)))  # no token at all is a call, too
    given = (*hiddens, weight) if bias is None else (*hiddens, weight, bias)
    needed = [torch.is_grad_enabled() and each.requires_grad for each in given]
    settings = _ChunkedSettings(targets, tuple(scales), reduction, terms, columns, rows, needed, sums)
    return _ChunkedLoss.apply(settings, *given)


def default_chunk_size(N: int, V: int, C: int) -> int:
    """Return how many of N rows are computed at a time: as many as make the logits of a chunk as large as the hidden
    states of all rows, N·C/V, rounded up to a power of two, and at least 256. Products of fewer rows are slow."""
    return max(1, min(N, max(256, 2 ** max(0, (N * C - 1) // V).bit_length())))


class _ChunkedSettings(NamedTuple):
    """What the loss is given besides tensors that may have gradients."""

    targets: list
    scales: tuple
    reduction: str
    terms: Terms
    columns: VocabularyColumns
    rows: int
    needed: list  # of each tensor given: whether its gradient is
    sums: torch.dtype  # of dW


class _GradientSums:
    """Hold what forward computes for backward: dh of each part in its dtype, sums of dW and db; None where not needed.

    `wide`, of db: fp32, or fp64 for fp64.
    """

    def __init__(self, given, K, needed, wide, sums):
        self.weight = WeightSum(given[K], sums) if needed[K] else None
        self.bias = torch.zeros_like(given[-1], dtype=wide) if len(given) > K + 1 and needed[-1] else None
        self.hiddens = [torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
                        for x, need in zip(given[:K], needed[:K], strict=True)]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, *given):
        with torch.autocast(given[0].device.type, enabled=False):
            return _ChunkedLoss._forward(ctx, settings, *given)

    @staticmethod
    def _forward(ctx, settings, *given):
        K = len(settings.targets)
        hiddens, weight, bias = given[:K], given[K].to(given[0].dtype), given[K + 1] if len(given) > K + 1 else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        factors, ctx.power = part_factors(settings.targets, settings.scales, settings.reduction,
                                          settings.terms.ignore_index, wide)
        found = _GradientSums(given, K, settings.needed, wide, settings.sums) if any(settings.needed) else None
        losses = torch.zeros(K, dtype=wide, device=weight.device)
        buffers = _ChunkLogits(settings.rows, weight, wide)
        for k, (hidden, targets) in enumerate(zip(hiddens, settings.targets, strict=True)):
            for first in range(0, len(hidden), settings.rows):
                at = slice(first, first + settings.rows)
                dh = None if found is None or found.hiddens[k] is None else found.hiddens[k][at]
                losses[k].add_(_chunk(hidden[at], weight, bias, targets[at], factors[k], settings, buffers, found, dh))
        del buffers  # before what follows takes memory
        if found is not None and settings.columns.comm is not None:
            for dh in found.hiddens:
                if dh is not None:
                    settings.columns.comm.all_reduce(dh, out=dh, label="gradient of hidden")
        ctx.found, ctx.dtypes, ctx.rows = found, [x.dtype for x in given], settings.rows
        losses.mul_(ctx.power)
        total = losses.sum()
        if any(scale != 1 for scale in settings.scales):  # the losses apart are those without their scales
            losses.div_(torch.tensor(settings.scales, dtype=wide, device=losses.device))
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return total, losses

    @staticmethod
    def backward(ctx, gradient, _):
        refuse_second_derivative(gradient)
        found, ctx.found = ctx.found, None  # the gradients are handed over: a second backward has none
        if found is None:
            raise RuntimeError("backward a second time through a chunked cross-entropy: its gradients were computed in "
                               "forward and handed over in the first backward. Compute the loss again")
        scale = ctx.power.mul_(gradient)  # the power of two that `part_factors` left out, and the caller's loss scale
        K = len(found.hiddens)
        results = [scaled(dh, scale, dtype, ctx.rows) for dh, dtype in zip(found.hiddens, ctx.dtypes, strict=False)]
        dw = found.weight and found.weight.handed_on(scale, ctx.dtypes[K], ctx.rows)
        results += [dw, scaled(found.bias, scale, ctx.dtypes[-1], ctx.rows)][: len(ctx.dtypes) - K]
        return None, *results


class _ChunkLogits:
    """Memory for a chunk's logits: (R, V) in fp32 and, for 16-bit inputs, (R, V) in their dtype."""

    def __init__(self, rows, weight, wide):
        self.wide = weight.new_empty((rows, len(weight)), dtype=wide)  # once: every chunk uses the same memory
        self.narrow = self.wide if weight.dtype == wide else weight.new_empty((rows, len(weight)))


def _chunk(h_RC, weight_VC, bias_V, targets_R, factor, settings, buffers, found, dh_RC):
    """Return the sum of the losses of a chunk; add its gradients to `found`, and write those of its rows to dh_RC."""
    z_RV, narrow_RV = buffers.wide[: len(h_RC)], buffers.narrow[: len(h_RC)]
    torch.mm(h_RC, weight_VC.T, out=narrow_RV)
    if narrow_RV.dtype != z_RV.dtype:
        z_RV.copy_(narrow_RV)  # 16-bit products, as plain layers have; softmax in fp32
    if bias_V is not None:
        z_RV.add_(bias_V)
    loss_R = row_losses(z_RV, targets_R, settings.terms, settings.columns, factor, found is not None)
    if found is None:
        return loss_R.sum()
    if found.bias is not None:
        found.bias.add_(z_RV.sum(0))
    if narrow_RV.dtype != z_RV.dtype and (dh_RC is not None or z_RV.is_cuda or settings.sums == narrow_RV.dtype):
        narrow_RV.copy_(z_RV)
    if dh_RC is not None:
        torch.mm(narrow_RV, weight_VC, out=dh_RC)
    if found.weight is not None:
        found.weight.add(z_RV, narrow_RV, h_RC)
    return loss_R.sum()
