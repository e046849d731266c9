"""What ring attention asks of an attention: its forward with the logsumexp, and its backward for a given one.

A rank computes attention over one block of keys after the other. The weights of a block follow from the logsumexp of
the whole sequence, P = e^(S − L), which is known after forward. So backward has to take it, instead of computing that
of the block alone, as autograd would.
"""

import math

import torch

from ..common.attention_pair import AttentionPair


def _scores(q_BHTD, k_BGSD, causal, scale, window=None):
    """Return S, (B, G, H/G · T, S) in fp32 or wider, with −∞ where a query does not see a key; and the rows of q."""
    (_, H, T, D), (G, S), wide = q_BHTD.shape, k_BGSD.shape[1:3], torch.promote_types(q_BHTD.dtype, torch.float32)
    rows_BGRD = q_BHTD.unflatten(1, (G, H // G)).flatten(2, 3).to(wide)  # the heads of a group become rows
    scores_BGRS = (rows_BGRD * (D ** -0.5 if scale is None else scale)) @ k_BGSD.to(wide).mT
    if causal:
        later_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).triu_(1 + S - T)
        if window is not None:  # the last query is beside the last key
            later_TS |= torch.ones_like(later_TS).tril_(S - T - window - 1)
        scores_BGRS.unflatten(2, (H // G, T)).masked_fill_(later_TS, -math.inf)
    return scores_BGRS, rows_BGRD


def _forward(q_BHTD, k_BGSD, v_BGSD, *, causal=False, scale=None, window=None):
    scores_BGRS, rows_BGRD = _scores(q_BHTD, k_BGSD, causal, scale, window)
    lse_BGR1 = scores_BGRS.logsumexp(-1, keepdim=True)
    out_BGRD = scores_BGRS.sub_(lse_BGR1).exp_() @ v_BGSD.to(rows_BGRD.dtype)  # in place: one T × S matrix at a time
    return out_BGRD.view(q_BHTD.shape), lse_BGR1.view(q_BHTD.shape[:3])


def _backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, *, causal=False, scale=None,
              window=None):
    weights_BGRS, rows_BGRD = _scores(q_BHTD, k_BGSD, causal, scale, window)
    shape, wide, scale = rows_BGRD.shape, rows_BGRD.dtype, q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    weights_BGRS.sub_(lse_BHT.reshape(*shape[:3], 1)).exp_()  # of the whole sequence, not of this block
    d_out_BGRD = d_out_BHTD.to(wide).reshape(shape)
    # Σ_j P_j dP_j over the whole sequence is dO · O, so that keys elsewhere are not needed.
    delta_BGR1 = (d_out_BHTD.to(wide) * out_BHTD.to(wide)).sum(-1).view(*shape[:3], 1)
    dv_BGSD = weights_BGRS.mT @ d_out_BGRD
    ds_BGRS = weights_BGRS.mul_((d_out_BGRD @ v_BGSD.to(wide).mT).sub_(delta_BGR1)).mul_(scale)
    return (ds_BGRS @ k_BGSD.to(wide)).view(q_BHTD.shape), ds_BGRS.mT @ rows_BGRD, dv_BGSD


dense_pair = AttentionPair(_forward, _backward)  # with a block's T × S matrix in memory, as `model.softmax_attention`
