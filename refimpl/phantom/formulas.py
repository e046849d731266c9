"""Operations that only CUDA has, or that a CPU has with other arguments, in plain torch.

Attention's kernels return softmax(scale · q kᵀ + bias) · v in the type of q, and the logsumexp of the scores in fp32.
What they keep of dropout for backward is a seed.
"""

import math

import torch

aten = torch.ops.aten
PADDED = 32  # queries: the efficient kernel's logsumexp is padded to a multiple


def seed_of(generator):
    """Return a seed that follows from the state of a CUDA generator, and changes with each use of it."""
    return hash((generator.initial_seed(), generator.get_offset())) & (2**62 - 1)


def _probabilities(q, k, bias, causal, scale):
    """Return (probabilities, logsumexp, scale) in fp32."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1), scale


def _kept(p, seed, dropout):
    """Return dropout's factors, 0 or 1 / (1 − dropout), from its seed; 1 without dropout."""
    if not dropout:
        return 1
    drawn = torch.rand(p.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn >= dropout).float() / (1 - dropout)


def _for_each_query_head(q, *others):
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x for x in others]


def attend(q, k, v, bias, causal, scale, dropout=0.0):
    """Return (output, logsumexp, seed)."""
    k, v = _for_each_query_head(q, k, v)
    p, lse, _ = _probabilities(q, k, bias, causal, scale)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    return ((p * _kept(p, seed, dropout)) @ v.float()).to(q.dtype), lse, torch.tensor(seed)


def attend_backward(d_out, q, k, v, bias, causal, scale, dropout, seed):
    """Return (dq, dk, dv)."""
    k_wide, v_wide = _for_each_query_head(q, k, v)
    p, _, scale = _probabilities(q, k_wide, bias, causal, scale)
    factors, d_out = _kept(p, int(seed.flatten()[0]) if dropout else 0, dropout), d_out.float()
    d_p = d_out @ v_wide.float().mT * factors
    d_s = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
    d_k, d_v = d_s.mT @ q.float(), (p * factors).mT @ d_out
    if k.shape[1] != q.shape[1]:
        d_k, d_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (d_k, d_v))
    return (d_s @ k_wide.float()).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _flash(q, k, v, dropout=0.0, causal=False, *_, scale=None):
    out, lse, seed = attend(q, k, v, None, causal, scale, dropout)
    return out, lse, None, None, q.shape[2], k.shape[2], torch.stack((seed, seed)), None, None


def _flash_backward(d_out, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, seed, offset, *, scale=None):
    return attend_backward(d_out, q, k, v, None, causal, scale, dropout, seed)


def _efficient(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    out, lse, seed = attend(q, k, v, bias, causal, scale, dropout)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % PADDED)) if with_lse else None, seed, torch.tensor(0)


def _efficient_backward(d_out, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    return attend_backward(d_out, q, k, v, bias, causal, scale, dropout, seed)


def _cudnn(q, k, v, bias, with_lse, dropout=0.0, causal=False, *_, scale=None):
    out, lse, seed = attend(q, k, v, bias, causal, scale, dropout)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, torch.tensor(0), None


def _cudnn_backward(d_out, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, dropout, causal, *, scale=None):
    return attend_backward(d_out, q, k, v, bias, causal, scale, dropout, seed)


def _layer_norm_backward(d_out, x, shape, mean, rstd, weight, bias, wanted):
    """Cast the statistics, which a GPU keeps in fp32, to the type of x, in which a CPU takes them."""
    return aten.native_layer_norm_backward(d_out, x, shape, mean.to(x.dtype), rstd.to(x.dtype), weight, bias, wanted)


def _rms_norm(x, shape, weight, eps):
    dims = tuple(range(-len(shape), 0))
    r = (x.float().square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    out = x.float() * r
    return (out * weight.float() if weight is not None else out).to(x.dtype), r


def _rms_norm_backward(d_out, x, shape, rstd, weight, wanted):
    """With n = x · r and g = d_out · weight:  dx = r · (g − n · mean(g · n)),  dweight = Σ d_out · n."""
    dims = tuple(range(-len(shape), 0))
    d_out, n = d_out.float(), x.float() * rstd.float()
    g = d_out * weight.float() if weight is not None else d_out
    dx = rstd.float() * (g - n * (g * n).mean(dims, keepdim=True))
    rows = tuple(range(x.dim() - len(shape)))
    d_weight = (d_out * n).sum(rows) if rows else d_out * n
    return (dx.to(x.dtype) if wanted[0] else None,
            d_weight.to(weight.dtype) if wanted[1] and weight is not None else None)


def _batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    return *aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), None


def _batch_norm_backward(x, d_out, weight, mean, var, kept_mean, kept_rstd, eps, reserve):
    return aten.native_batch_norm_backward(d_out.to(x.dtype), x, weight, mean, var, kept_mean, kept_rstd, True, eps,
                                           [True] * 3)


def _to_fp32(operation):
    """Make the function of a 16-bit softmax whose result a GPU writes in fp32."""
    return lambda x, dim, half_to_float: operation(x.float() if half_to_float else x, dim, False)


def _from_fp32(operation):
    return lambda d_out, out, dim, dtype: operation(d_out, out, dim, out.dtype).to(dtype)


# Operation → what computes it with tensors of the CPU. What is left out (None) keeps what it held.
ON_THE_CPU = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.cudnn_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    aten._softmax.default: _to_fp32(aten._softmax.default),
    aten._log_softmax.default: _to_fp32(aten._log_softmax.default),
    aten._softmax_backward_data.default: _from_fp32(aten._softmax_backward_data.default),
    aten._log_softmax_backward_data.default: _from_fp32(aten._log_softmax_backward_data.default),
}
