"""The head's loss by Triton kernels: logits exist in a GPU's registers alone, a tile at a time.

Forward keeps one number for each row, the logsumexp; backward computes the logits again. That is two matrix products
more than `chunked_linear_cross_entropy`, less those of the tiles that softmax makes negligible (`skip`). No buffer
grows with R · V, and nothing but the logsumexp is kept between forward and backward.

With a vocabulary split over ranks each rank's kernels see its own words. A row's logsumexp is that of the ranks'
logsumexps, two all_reduces of a few numbers for each row; the gradient of hidden is the sum of the ranks', in backward.
"""

from typing import NamedTuple

import torch

from .call import check_call, flat, refuse_second_derivative
from .closed_forms import HeadBytes
from .kernels.configs import config_for
from .rows import Columns, Terms, exchange, part_factors

NOTHING = -1.0  # no element is less
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELSEWHERE, IGNORED = -1, -2  # targets that are no column of this rank, if ranks split the columns


@torch._disable_dynamo
def fused_linear_cross_entropy(hidden, weight, targets, ignore_index=-100, bias=None, reduction="mean", *,
                               label_smoothing=0.0, z_loss=0.0, softcap=None, skip=None, comm=None, vocabulary=None):
    """Return what `chunked_linear_cross_entropy` does, by Triton kernels. Arguments and errors are the same but for:

    - `skip`: leave tiles of the gradient out in which no element is above this in absolute value, such as 2**-12. The
      loss stays the same; `triton_backward` bounds the gradient's error. By default nothing is left out.
    - dtypes: fp32, bf16 or fp16. The weight's gradient is summed in fp32.
    - device: a GPU, or a CPU with TRITON_INTERPRET=1 in the environment before Triton is imported, in fp32 and fp16.
    - `comm`, `vocabulary`: forward has two all_reduces, and backward one, of the gradient of hidden in its dtype: all
      ranks call both. `split_cross_entropy_traffic` with chunk_size=N gives their bytes.

    Two runs give the same bits. `fused_cross_entropy_bytes` gives the bytes. Raises ValueError for a `skip` that is
    negative, and for a bias that needs a gradient beside a weight that needs none; RuntimeError on a CPU otherwise.
    """
    loss, _ = fused_multi_token_cross_entropy(
        [hidden], weight, [targets], None, ignore_index, bias, reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, skip=skip, comm=comm, vocabulary=vocabulary)
    return loss


@torch._disable_dynamo
def fused_multi_token_cross_entropy(hiddens, weight, targets, scales=None, ignore_index=-100, bias=None,
                                    reduction="mean", *, label_smoothing=0.0, z_loss=0.0, softcap=None, skip=None,
                                    comm=None, vocabulary=None):
    """Return what `multi_token_cross_entropy` does, (Σ_k scales[k] · loss_k, losses (K,) without a graph), by Triton
    kernels: each loss adds to the same gradient of the weight, in fp32. Options and errors are those of
    `fused_linear_cross_entropy`."""
    if skip is not None and not skip >= 0:
        raise ValueError(f"skip={skip!r}: expected a number of at least 0, or None to leave out nothing")
    scales = [1.0] * len(hiddens) if scales is None else [float(scale) for scale in scales]
    terms, columns = Terms(ignore_index, label_smoothing, z_loss, softcap), Columns.of(comm, len(weight), vocabulary)
    hiddens = check_call(hiddens, weight, targets, scales, bias, reduction, None, terms, columns)
    if hiddens[0].dtype not in DTYPES:
        raise TypeError(f"hidden is of {hiddens[0].dtype}: expected fp32, bf16 or fp16; chunked_linear_cross_entropy "
                        "takes fp64")
    if bias is not None and bias.requires_grad and not weight.requires_grad:
        raise ValueError("bias needs a gradient and weight does not: expected both to, or neither")
    plan = _Plan([flat(each) for each in targets], tuple(scales), reduction, terms, columns,
                 NOTHING if skip is None else float(skip))
    return _Loss.apply(plan, weight, bias, *hiddens)


class _Plan(NamedTuple):
    """What the loss is given besides tensors that may have gradients."""

    targets: list
    scales: tuple
    reduction: str
    terms: Terms
    columns: Columns
    skip: float

    def options(self):
        """Return the terms as operators take them."""
        ignore_index, label_smoothing, z_loss, softcap = self.terms
        ignore_index = ignore_index if self.columns.comm is None else IGNORED
        return ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0), self.columns.V


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, weight, bias, *hiddens):
        cast = weight.to(hiddens[0].dtype).contiguous()
        ctx.factors, ctx.power = part_factors(plan.targets, plan.scales, plan.reduction, plan.terms.ignore_index,
                                              torch.float32)
        losses, found = torch.zeros_like(ctx.factors), []
        for k, (hidden, targets) in enumerate(zip(hiddens, plan.targets, strict=True)):
            loss_N, *for_backward = _rows(hidden.contiguous(), cast, bias, targets, plan)
            torch.sum(loss_N, 0, out=losses[k])
            found += for_backward
            del loss_N
        ctx.save_for_backward(weight, bias, *hiddens, *found)
        ctx.plan = plan
        losses.mul_(ctx.factors).mul_(ctx.power)
        total = losses.sum()
        if any(scale != 1 for scale in plan.scales):  # the losses apart are those without their scales
            losses.div_(torch.tensor(plan.scales, device=losses.device))
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return total, losses

    @staticmethod
    def backward(ctx, gradient, _):
        refuse_second_derivative()
        plan, (weight, bias, *rest) = ctx.plan, ctx.saved_tensors
        hiddens, rest = rest[: len(plan.targets)], rest[len(plan.targets) :]
        needs_weight, needs_bias, *needs = ctx.needs_input_grad[1:]
        cast = weight.to(hiddens[0].dtype).contiguous()
        dw, db = (torch.zeros_like(x, dtype=torch.float32) if need else None
                  for x, need in ((weight, needs_weight), (bias, needs_bias)))
        scale = ctx.power * gradient
        results = [_part(plan, hidden, cast, bias, *rest[2 * k : 2 * k + 2], ctx.factors[k], scale, dw, db, needs[k])
                   for k, hidden in enumerate(hiddens)]
        for x, total in ((bias, db), (weight, dw)):
            results.insert(0, None if total is None else total.mul_(scale).to(x.dtype))
        return None, *results


def _rows(hidden, weight, bias, targets, plan):
    """Return the rows' losses (N,), 0 where the target is ignored; then targets and logsumexp, as backward needs them:
    with split columns a target is a column here, ELSEWHERE or IGNORED."""
    from .kernels.operators import head_forward
    from .triton_forward import combined

    terms, columns = plan.terms, plan.columns
    ignored_N, here_N, elsewhere_N = targets == terms.ignore_index, targets, None
    if columns.comm is not None:
        here_N, elsewhere_N = columns.find(targets)
        here_N = here_N.masked_fill_(elsewhere_N, ELSEWHERE).masked_fill_(ignored_N, IGNORED)
    parts = head_forward(hidden, weight, bias, here_N, *plan.options())
    lse_N, predicted_N, total_N = combined(parts)
    del parts
    if columns.comm is not None:
        lse_N, predicted_N, total_N = _over_ranks(lse_N, predicted_N, total_N, targets, elsewhere_N, ignored_N, plan)
    loss_N = lse_N.sub(predicted_N, alpha=1 - terms.label_smoothing)
    if terms.label_smoothing:
        loss_N.sub_(total_N, alpha=terms.label_smoothing / columns.V)
    if terms.z_loss:
        loss_N.addcmul_(lse_N, lse_N, value=terms.z_loss)
    return loss_N.masked_fill_(ignored_N, 0), here_N, lse_N


def _over_ranks(lse_N, predicted_N, total_N, targets_N, elsewhere_N, ignored_N, plan):
    """Return (lse, target's logit, sum of logits), (N,) each, of all ranks' words. The last is None if nobody asks."""
    sums = lse_N.new_empty((3 + bool(plan.terms.label_smoothing), len(lse_N)))
    m_N = plan.columns.reduce(lse_N.clone(), "max", "maximum of logits")
    torch.sub(lse_N, m_N, out=sums[0]).exp_()
    sums[1].copy_(predicted_N)
    if plan.terms.label_smoothing:
        sums[2].copy_(total_N)
    exchange(sums, targets_N, elsewhere_N, ignored_N, plan.columns)
    return m_N.add_(sums[0].log()), sums[1], sums[2] if plan.terms.label_smoothing else None


def _part(plan, hidden, weight, bias, targets, lse, factor, scale, dw, db, needed):
    """Add one loss's part to dW and db, in fp32; return the gradient of its hidden states, or None if not needed."""
    from .kernels.operators import head_backward
    from .triton_backward import empty_used

    dh = used = None
    hidden = hidden.contiguous()
    if needed:
        dh = torch.zeros_like(hidden, dtype=torch.float32)
        used = empty_used(hidden, len(weight), config_for("hidden", hidden.device, hidden.dtype,
                                                          plan.terms.softcap is not None))
    head_backward(hidden, weight, bias, targets, lse, factor, dh, dw, db, used, *plan.options(), plan.skip)
    del used
    if needed:
        dh = dh.mul_(factor * scale).to(hidden.dtype)
        plan.columns.reduce(dh, "sum", "gradient of hidden")
    return dh


def fused_cross_entropy_bytes(N, V, C, dtype=torch.float32, *, bias=False, softcap=None, parts=1, split=False,
                              label_smoothing=0.0, device="cpu"):
    """Return HeadBytes of `fused_linear_cross_entropy` and its backward.

        saved       4K·N + 4K + 8                   the logsumexp; factors and the loss; K = `parts` losses of one head
        forward     saved + 4(K − 1) + 12·P·N + 13N P parts of the vocabulary, three numbers each; then together
        backward    saved + 8 + 4·V·(C + 1) + max(  dW and db in fp32; db only with a bias
                        (K − 1)·N·C·d + 4·N·C + max(tiles, 4, N·C·d),  a loss's dh in fp32, its factor, then 16 bits
                        K·N·C·d + V·(C + 1)·d)                         16 bits: dW and db are cast

    `tiles`: a byte for each tile of logits. No term has N·V but that one. `split`: V is this rank's part; each loss
    keeps its targets as columns here, 8N more, and exchanges rows of numbers in forward, 51N or 55N beside `saved`.
    """
    from .triton_backward import empty_used
    from .triton_forward import empty_parts

    hidden = torch.empty(N, C, dtype=dtype, device="meta")
    configs = [config_for(kernel, device, dtype, softcap is not None) for kernel in ("forward", "hidden")]
    P, tiles = empty_parts(hidden, V, configs[0]).nbytes, empty_used(hidden, V, configs[1]).numel()
    d, half, K = dtype.itemsize, dtype.itemsize == 2, parts
    row = 4 + 8 * split
    saved = K * row * N + 4 * K + 8
    exchanged = (51 + 4 * bool(label_smoothing)) * N * split
    forward = saved - row * N + 4 * (K - 1) + max(P + (17 + 9 * split) * N, exchanged)
    gradients = 4 * (V * C + V * bias)
    backward = saved + 8 + gradients + max((K - 1) * N * C * d + 4 * N * C + max(tiles, 4, N * C * d * half),
                                           K * N * C * d + V * (C + bias) * d * half)
    return HeadBytes(saved, forward, backward)
