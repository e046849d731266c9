"""Linear attention inside of models: functions and modules of (q, k, v), as `GPT(config, attention=…)` takes them.

    linear_attention(q, k, v, causal=True)              a feature map and a normaliser, no parameters
    GatedDeltaAttention(heads, head_dim)(q, k, v)       gates that are learned, and the delta rule
    chunk_gated_delta_rule(query, key, value, …)        `gated_delta_rule` as fla and transformers' Qwen3-Next call it
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..call.arguments import check_mask, check_tensors, without_autocast
from ..reference import wide_dtype
from ..tiled import check_sizes
from .delta_rule import gated_delta_rule

UNREAD = {"use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict", "labels",
          "num_items_in_batch", "position_ids", "cache_position", "logits_to_keep"}  # that models hand on


def linear_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, causal: bool = False,
                     kernel: str = "auto") -> torch.Tensor:
    """Compute Σ_j (φ(q)·φ(k_j)) v_j / Σ_j φ(q)·φ(k_j) with φ(x) = elu(x) + 1: attention whose weights are a product,
    not the softmax of one. Returns (B, H, T, V) in q's dtype. FLOPs and bytes are linear in T and S.

    The normaliser is one more column of v, of ones. `causal`: query i sees keys j ≤ i, for as many queries as keys, by
    `gated_delta_rule` without its rule. G divides H. Raises as that does, and ValueError for T ≠ S if causal.

    Katharopoulos et al. 2020, equations 7 to 12.
    """
    check_tensors(q_BHTD, k_BGSD, v_BGSV)
    check_mask(causal, None)
    (H, T), (G, S) = q_BHTD.shape[1:3], k_BGSD.shape[1:3]
    if causal and T != S:
        raise ValueError(f"{T} queries and {S} keys with causal=True: expected as many; gated_delta_rule goes on from "
                         "a state")
    q_BHTD, k_BHSD = (F.elu(x) + 1 for x in (q_BHTD, k_BGSD.repeat_interleave(H // G, 1)))
    v_BHSV = torch.cat([v_BGSV, torch.ones_like(v_BGSV[..., :1])], dim=-1).repeat_interleave(H // G, 1)
    if causal:
        out_BHTV = gated_delta_rule(q_BHTD, k_BHSD, v_BHSV, scale=1.0, delta=False, kernel=kernel)
    else:
        wide = wide_dtype(q_BHTD.dtype)
        with without_autocast(q_BHTD.device):  # a sum over S keys may exceed what 16 bits hold
            out_BHTV = q_BHTD.to(wide) @ (k_BHSD.mT.to(wide) @ v_BHSV.to(wide))
    return (out_BHTV[..., :-1] / out_BHTV[..., -1:]).to(q_BHTD.dtype)


class GatedDeltaAttention(nn.Module):
    """Attention of (q, k, v) by the gated delta rule: q and k are normalised, each head's gates are linear in its k,
    and each output is divided by its root mean square.

        β = sigmoid(k·w + b)        ln a = −softplus(k·w' + b')

    - `heads`, `head_dim`: of q. Keys and values may have fewer heads; a head that shares them still has a state of its
      own. `kernel`: as `gated_delta_rule` takes it.

    At first a head forgets by a factor e in 8 tokens, the last one in 8,192, and the others between. A GPT that is
    given one module shares it among its layers: `in_each_layer` gives each its own. Gated DeltaNet (Yang et al. 2024)
    takes gates of the layer's input, and a short convolution before q, k and v.
    """

    def __init__(self, heads: int, head_dim: int, kernel: str = "auto") -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        self.kernel = kernel
        self.write, self.decay = (nn.Parameter(torch.zeros(heads, head_dim)) for _ in range(2))
        self.write_bias = nn.Parameter(torch.zeros(heads))
        tokens = torch.logspace(3, 13, heads, base=2)  # softplus(b') = 1 / tokens
        self.decay_bias = nn.Parameter((1 / tokens).expm1().log())

    def forward(self, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTV: torch.Tensor, *, causal: bool = True,
                state_BHDV: torch.Tensor | None = None, return_state: bool = False) -> Any:
        """Return (B, H, T, V), and with `return_state` the state after the last token: `gated_delta_rule` takes it.
        ValueError if not `causal`: a state knows what came before alone."""
        check_tensors(q_BHTD, k_BGTD, v_BGTV)
        if not causal:
            raise ValueError("causal=False with a gated delta rule: expected True, a state knows what came before "
                             "alone; linear_attention(…, causal=False) sums over all keys")
        k_BHTD, v_BHTV = (x.repeat_interleave(len(self.write) // x.shape[1], 1) for x in (k_BGTD, v_BGTV))
        if q_BHTD.shape[1::2] != self.write.shape or k_BHTD.shape != q_BHTD.shape:
            raise ValueError(f"q and k of shapes {tuple(q_BHTD.shape)} and {tuple(k_BGTD.shape)} with "
                             f"{self.write.shape[0]} heads of {self.write.shape[1]}: expected as many, k's heads a "
                             "divisor")
        q_BHTD, k_BHTD = (F.normalize(x, dim=-1) for x in (q_BHTD, k_BHTD))
        gates_BHT = [(k_BHTD @ w.to(k_BHTD.dtype).unsqueeze(-1)).squeeze(-1) * math.sqrt(k_BHTD.shape[-1])
                     + b.unsqueeze(-1) for w, b in ((self.write, self.write_bias), (self.decay, self.decay_bias))]
        found = gated_delta_rule(q_BHTD, k_BHTD, v_BHTV, -F.softplus(gates_BHT[1]), gates_BHT[0].sigmoid(), scale=1.0,
                                 state_BHDV=state_BHDV, return_state=True, kernel=self.kernel)
        out_BHTV = F.rms_norm(found[0], found[0].shape[-1:])
        return (out_BHTV, found[1]) if return_state else out_BHTV


def chunk_gated_delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
                           beta: torch.Tensor, scale: float | None = None,
                           initial_state: torch.Tensor | None = None, output_final_state: bool = False,
                           use_qk_l2norm_in_kernel: bool = False,
                           **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `gated_delta_rule` for tensors (batch, sequence, heads, …), as flash-linear-attention (fla) and the
    models of transformers call it: (out, the last state or None).

    `options`: chunk_size is read; TypeError for others that are not None or False, such as packed sequences
    (cu_seqlens); what a model hands on that says nothing of attention (UNREAD) is left out. Raises as
    `gated_delta_rule` does.
    """
    chunk = options.pop("chunk_size", None)
    if unknown := [name for name, given in options.items() if
                   not (given is None or given is False or name in UNREAD)]:
        raise TypeError(f"{unknown[0]}={options[unknown[0]]!r}: what that does here is not known; expected chunk_size, "
                        "initial_state, output_final_state and use_qk_l2norm_in_kernel alone")
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype) for x in (query, key))
    T = query.shape[1]
    out_BHTV, last_BHDV = gated_delta_rule(
        *(x.transpose(1, 2) for x in (query, key, value, g, beta)), scale=scale, state_BHDV=initial_state,
        return_state=True, chunk=chunk if chunk and T % chunk == 0 else None)
    return out_BHTV.transpose(1, 2), last_BHDV if output_final_state else None
