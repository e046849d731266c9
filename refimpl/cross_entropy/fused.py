"""The head's loss by Triton kernels: logits exist in a GPU's registers alone, a tile at a time.

Forward keeps one number for each row, the logsumexp; backward computes the logits again. That is two matrix products
more than `chunked_linear_cross_entropy`, less those of the tiles that softmax makes negligible (`skip`). No buffer
grows with R · V, and nothing but the logsumexp is kept between forward and backward. There dh comes first, whose sums
in fp32 are freed, then dW. A sum of dW is done when all rows have passed, so the words go block by block: sums in fp32
of a 16-bit weight, and the cast of a weight under autocast, are those of a block.

With a vocabulary split over ranks each rank's kernels see its own words. A row's logsumexp is that of the ranks'
logsumexps, two all_reduces of a few numbers for each row; the gradient of hidden is the sum of the ranks', in backward.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .call import check_call, flat, refuse_second_derivative, sum_dtype
from .closed_forms import HeadBytes
from .kernels.configs import config_for, words_at_once
from .rows import Terms, VocabularyColumns, exchange, part_factors

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

NOTHING = -1.0  # no element is less
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELSEWHERE, IGNORED = -1, -2  # targets that are no column of this rank, if ranks split the columns
NEVER = -(2**31)  # a target that is ignored, where a block of words has targets of its own


@torch._disable_dynamo
def fused_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                               ignore_index: int = -100, bias: torch.Tensor | None = None, reduction: str = "mean", *,
                               label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                               skip: bool | None = None, comm: "Communicator | None" = None,
                               vocabulary: int | None = None,
                               weight_gradient: torch.dtype | None = None) -> torch.Tensor:
    """Return what `chunked_linear_cross_entropy` does, by Triton kernels. Arguments and errors are the same but for:

    - `skip`: leave tiles of the gradient out in which no element is above this in absolute value, such as 2**-12. The
      loss stays the same; `triton_backward` bounds the gradient's error. By default nothing is left out.
    - dtypes: fp32, bf16 or fp16. In the bound for `weight_gradient`, J is the number of tiles of rows, N/128 on an
      H100.
    - device: a GPU, or a CPU with TRITON_INTERPRET=1 in the environment before Triton is imported, in fp32 and fp16.
    - `comm`, `vocabulary`: forward has two all_reduces, and backward one, of the gradient of hidden in its dtype: all
      ranks call both. `split_cross_entropy_traffic` with chunk_size=N gives their bytes.

    Two runs give the same bits. `fused_cross_entropy_bytes` gives the bytes. Raises ValueError for a `skip` that is
    negative, and for a bias that needs a gradient beside a weight that needs none; RuntimeError on a CPU otherwise.
    """
    loss, _ = fused_multi_token_cross_entropy(
        [hidden], weight, [targets], None, ignore_index, bias, reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, skip=skip, comm=comm, vocabulary=vocabulary, weight_gradient=weight_gradient)
    return loss


@torch._disable_dynamo
def fused_multi_token_cross_entropy(hiddens: Sequence[torch.Tensor], weight: torch.Tensor,
                                    targets: torch.Tensor | Sequence[torch.Tensor], scales: Any = None,
                                    ignore_index: int = -100, bias: torch.Tensor | None = None, reduction: str = "mean",
                                    *, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                                    skip: bool | None = None, comm: "Communicator | None" = None,
                                    vocabulary: int | None = None,
                                    weight_gradient: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `multi_token_cross_entropy` does, (Σ_k scales[k] · loss_k, losses (K,) without a graph), by Triton
    kernels: each loss adds to the same gradient of the weight. Options and errors are those of
    `fused_linear_cross_entropy`."""
    if skip is not None and not skip >= 0:
        raise ValueError(f"skip={skip!r}: expected a number of at least 0, or None to leave out nothing")
    scales = [1.0] * len(hiddens) if scales is None else [float(scale) for scale in scales]
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    columns = VocabularyColumns.of(comm, len(weight), vocabulary)
    hiddens = check_call(hiddens, weight, targets, scales, bias, reduction, None, terms, columns)
    if hiddens[0].dtype not in DTYPES:
        raise TypeError(f"hidden is of {hiddens[0].dtype}: expected fp32, bf16 or fp16; chunked_linear_cross_entropy "
                        "takes fp64")
    if bias is not None and bias.requires_grad and not weight.requires_grad:
        raise ValueError("bias needs a gradient and weight does not: expected both to, or neither")
    sums = sum_dtype(weight_gradient, weight, hiddens[0].dtype)
    settings = _FusedSettings([flat(each) for each in targets], tuple(scales), reduction, terms, columns,
                              NOTHING if skip is None else float(skip), sums)
    return _FusedLoss.apply(settings, weight, bias, *hiddens)


class _FusedSettings(NamedTuple):
    """What the loss is given besides tensors that may have gradients."""

    targets: list
    scales: tuple
    reduction: str
    terms: Terms
    columns: VocabularyColumns
    skip: float
    sums: torch.dtype  # of dW

    def operator_arguments(self):
        """Return the terms as operators take them."""
        ignore_index, label_smoothing, z_loss, softcap = self.terms
        ignore_index = ignore_index if self.columns.comm is None else IGNORED
        return ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0), self.columns.V


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, weight, bias, *hiddens):
        cast = weight.to(hiddens[0].dtype).contiguous()  # not saved: backward casts block by block
        ctx.factors, ctx.power = part_factors(settings.targets, settings.scales, settings.reduction,
                                              settings.terms.ignore_index, torch.float32)
        losses, found = torch.zeros_like(ctx.factors), []
        for k, (hidden, targets) in enumerate(zip(hiddens, settings.targets, strict=True)):
            loss_N, *for_backward = _rows(hidden.contiguous(), cast, bias, targets, settings)
            torch.sum(loss_N, 0, out=losses[k])
            found += for_backward
            del loss_N  # before the next loss has its own
        ctx.save_for_backward(weight, bias, *hiddens, *found)
        ctx.settings = settings
        losses.mul_(ctx.factors).mul_(ctx.power)
        total = losses.sum()
        if any(scale != 1 for scale in settings.scales):  # the losses apart are those without their scales
            losses.div_(torch.tensor(settings.scales, device=losses.device))
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return total, losses

    @staticmethod
    def backward(ctx, gradient, _):
        refuse_second_derivative(gradient)
        settings, (weight, bias, *rest) = ctx.settings, ctx.saved_tensors
        hiddens, rest = rest[: len(settings.targets)], rest[len(settings.targets) :]
        needs_weight, _, *needs = ctx.needs_input_grad[1:]
        parts = [_LossPart(hidden, *rest[2 * k : 2 * k + 2], ctx.factors[k]) for k, hidden in enumerate(hiddens)]
        head, scale = _Head(weight, bias, hiddens[0].dtype, settings), ctx.power * gradient
        # Sums of dh are in fp32, all rows of a part: they are rounded, and freed, before dW is there.
        used, results = zip(*[_hidden(head, part, scale) if need else ([], None)
                              for part, need in zip(parts, needs, strict=True)], strict=True)
        return None, *(_weight(head, parts, used, scale) if needs_weight else (None, None)), *results


class _LossPart(NamedTuple):
    """One of the losses, as backward knows it."""

    hidden: torch.Tensor
    targets: torch.Tensor
    lse: torch.Tensor
    factor: torch.Tensor


class _Head(NamedTuple):
    """A head in blocks of words: a block's weight is cast, and a block's sums of dW are rounded, at a time."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    settings: _FusedSettings

    def blocks(self):
        """Return slices of words, a single one if the weight is neither cast nor its sums rounded."""
        V = len(self.weight)
        apart = self.weight.dtype != self.dtype or self.weight.dtype != self.settings.sums
        size = words_at_once(V, self.weight.device) if apart else V
        return [slice(first, min(first + size, V)) for first in range(0, V, size)]

    def add(self, part, block, dh, dw, db, used):
        """Add a block's part of the gradients of one loss to dh, or to dW and db of these words."""
        from .kernels.operators import head_backward

        targets, options = part.targets, self.settings.operator_arguments()
        if block.start:
            targets = targets.sub(block.start).masked_fill_(targets == options[0], NEVER)
            options = (NEVER, *options[1:])  # a block's own targets may be below 0, as −100 is
        weight, bias = (x if x is None else x[block] for x in (self.weight, self.bias))
        head_backward(part.hidden.contiguous(), weight.to(self.dtype).contiguous(), bias, targets, part.lse,
                      part.factor, dh, dw, db, used, *options, self.settings.skip)


def _hidden(head, part, scale):
    """Return (which tiles were used, block by block; the gradient of a part's hidden states)."""
    from .triton_backward import empty_used

    dh, used = torch.zeros(part.hidden.shape, dtype=torch.float32, device=part.hidden.device), []
    settings = head.settings
    config = config_for("hidden", dh.device, head.dtype, settings.terms.softcap is not None)
    for block in head.blocks():
        used.append(empty_used(dh, block.stop - block.start, config))
        head.add(part, block, dh, None, None, used[-1])
    dh = dh.mul_(part.factor * scale).to(head.dtype)
    settings.columns.reduce(dh, "sum", "gradient of hidden")
    return used, dh


def _weight(head, parts, used, scale):
    """Return the gradients of weight and bias, of all parts. `used`: what `_hidden` noted for each, or nothing."""
    weight, bias, _, settings = head
    blocks, dw = head.blocks(), torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = None if bias is None or not bias.requires_grad else torch.zeros_like(bias, dtype=torch.float32)
    apart = None
    if dw.dtype != settings.sums:
        apart = torch.empty_like(dw[: blocks[0].stop], dtype=settings.sums)
    for k, block in enumerate(blocks):
        sums = (dw[block] if apart is None else apart[: block.stop - block.start]).zero_()
        for part, tiles in zip(parts, used, strict=True):
            head.add(part, block, None, sums, None if db is None else db[block], tiles[k] if tiles else None)
        sums.mul_(scale)
        if apart is not None:
            dw[block] = sums
    del apart, sums
    return dw, None if db is None else db.mul_(scale).to(bias.dtype)


def _rows(hidden, weight, bias, targets, settings):
    """Return the rows' losses (N,), 0 where the target is ignored; then targets and logsumexp, as backward needs them:
    with split columns a target is a column here, ELSEWHERE or IGNORED."""
    from .kernels.operators import head_forward
    from .triton_forward import combined

    terms, columns = settings.terms, settings.columns
    ignored_N, here_N, elsewhere_N = targets == terms.ignore_index, targets, None
    if columns.comm is not None:
        here_N, elsewhere_N = columns.find(targets)
        here_N = here_N.masked_fill_(elsewhere_N, ELSEWHERE).masked_fill_(ignored_N, IGNORED)
    parts = head_forward(hidden, weight, bias, here_N, *settings.operator_arguments())
    lse_N, predicted_N, total_N = combined(parts)
    del parts  # freed before the exchange between ranks
    if columns.comm is not None:
        lse_N, predicted_N, total_N = _over_ranks(lse_N, predicted_N, total_N, targets, elsewhere_N, ignored_N,
                                                  settings)
    loss_N = lse_N.sub(predicted_N, alpha=1 - terms.label_smoothing)
    if terms.label_smoothing:
        loss_N.sub_(total_N, alpha=terms.label_smoothing / columns.V)
    if terms.z_loss:
        loss_N.addcmul_(lse_N, lse_N, value=terms.z_loss)
    return loss_N.masked_fill_(ignored_N, 0), here_N, lse_N


def _over_ranks(lse_N, predicted_N, total_N, targets_N, elsewhere_N, ignored_N, settings):
    """Return (lse, target's logit, sum of logits), (N,) each, of all ranks' words; the last None if not needed."""
    sums = lse_N.new_empty((3 + bool(settings.terms.label_smoothing), len(lse_N)))
    m_N = settings.columns.reduce(lse_N.clone(), "max", "maximum of logits")  # e^(lse − m) cannot overflow
    torch.sub(lse_N, m_N, out=sums[0]).exp_()
    sums[1].copy_(predicted_N)
    if settings.terms.label_smoothing:
        sums[2].copy_(total_N)
    exchange(sums, targets_N, elsewhere_N, ignored_N, settings.columns)
    return m_N.add_(sums[0].log()), sums[1], sums[2] if settings.terms.label_smoothing else None


def fused_cross_entropy_bytes(N: int, V: int, C: int, dtype: torch.dtype = torch.float32, *,
                              weight_dtype: torch.dtype | None = None, weight_gradient: torch.dtype | None = None,
                              bias: bool = False, softcap: float | None = None, parts: int = 1, split: bool = False,
                              label_smoothing: float = 0.0, device: torch.device | str = "cpu") -> HeadBytes:
    """Return HeadBytes of `fused_linear_cross_entropy` and its backward.

        saved       4K·N + 4K + 8                   the logsumexp; factors and the loss; K = `parts` losses of one head
        forward     saved + 4(K − 1) + 12·P·N + 13N + V·C·d if cast
                                                    P parts of the vocabulary, three numbers each; then together
        backward    saved + 8 + K·tiles + max(      a byte for each tile of logits
                        (K − 1)·N·C·d + 4·N·C + max(block, 4, N·C·d),
                                                    a loss's dh in fp32, its factor, then 16 bits
                        K·N·C·d + V·C·g + 4·V + max(4·B·C if apart + block, 2·V))
                                                    dW, g bytes each; db with a bias, in fp32, then 16 bits
        block       8N if B < V + max(N, B·C·d if cast)     its targets; which are ignored, then its weight

    B = `words_at_once` of V. cast: autocast casts the weight, of `weight_dtype`. apart: a 16-bit dW whose sums are in
    fp32 (`weight_gradient`). If neither, B = V. No term has N·V but `tiles`. `split`: V is this rank's part; each loss
    keeps its targets as columns here, 8N more, and exchanges rows of numbers in forward, 51N or 55N beside `saved`.
    """
    from .triton_backward import empty_used
    from .triton_forward import empty_parts

    hidden = torch.empty(N, C, dtype=dtype, device="meta")
    configs = [config_for(kernel, device, dtype, softcap is not None) for kernel in ("forward", "hidden")]
    P, tiles = empty_parts(hidden, V, configs[0]).nbytes, empty_used(hidden, V, configs[1]).numel()
    d, half, K, kept = dtype.itemsize, dtype.itemsize == 2, parts, weight_dtype or dtype
    cast, apart = kept != dtype, kept != (weight_gradient or torch.float32)
    B = min(V, words_at_once(V, device)) if cast or apart else V
    block = (8 * N + max(N, B * C * d * cast)) if B < V else B * C * d * cast
    row = 4 + 8 * split
    saved = K * row * N + 4 * K + 8
    exchanged = (51 + 4 * bool(label_smoothing)) * N * split
    forward = saved - row * N + 4 * (K - 1) + max(P + (17 + 9 * split) * N, exchanged) + V * C * d * cast
    of_hidden = (K - 1) * N * C * d + 4 * N * C + max(block, 4, N * C * d * half)
    of_weight = K * N * C * d + V * C * kept.itemsize + 4 * V * bias + max(B * C * 4 * apart + block,
                                                                           2 * V * bias * (kept.itemsize == 2))
    return HeadBytes(saved, forward, saved + 8 + K * tiles + max(of_hidden, of_weight))
