"""Attention with the whole matrix in memory, and the options that models of transformers ask for: what ranks compute
inside of Ulysses and over gathered keys unless they are given another, such as `refimpl.attention.flash_attention`."""

import math

import torch


def dense_attention(q_BHTD, k_BGSD, v_BGSD, *, causal=False, window=None, softcap=None, sinks=None):
    """Return softmax(S) v, (B, H, T, D), of S = q kᵀ / √D, in fp32 or wider. Query heads h·H/G … share key head h.

    - `causal`: the last query sees every key. `window`: a query sees so many keys before its own, and without `causal`
      as many after it.
    - `softcap`: c · tanh(S / c) in place of S (Gemma 2).
    - `sinks` (H,): of each head the score of a key without a value (gpt-oss).
    """
    (_, H, T, D), (G, S), wide = q_BHTD.shape, k_BGSD.shape[1:3], torch.promote_types(q_BHTD.dtype, torch.float32)
    k_BHSD, v_BHSD = (x.to(wide).repeat_interleave(H // G, 1) for x in (k_BGSD, v_BGSD))
    scores_BHTS = q_BHTD.to(wide) * D ** -0.5 @ k_BHSD.mT
    if softcap is not None:
        scores_BHTS = softcap * (scores_BHTS / softcap).tanh()
    # The last query stands at the last key.
    ahead_TS = torch.arange(S, device=q_BHTD.device) - torch.arange(S - T, S, device=q_BHTD.device)[:, None]
    ahead = math.inf if window is None else window
    hidden_TS = ahead_TS > (0 if causal else ahead)
    if window is not None:
        hidden_TS |= ahead_TS < -window
    scores_BHTS = scores_BHTS.masked_fill(hidden_TS, -math.inf)
    if sinks is not None:
        sinks_BHT1 = sinks.to(wide).view(-1, 1, 1).expand(*scores_BHTS.shape[:3], 1)
        scores_BHTS = torch.cat((scores_BHTS, sinks_BHT1), -1)
    return (scores_BHTS.softmax(-1)[..., :S] @ v_BHSD).to(q_BHTD.dtype)  # a sink takes weight, and has no value
