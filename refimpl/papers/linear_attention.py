"""Linear attention in one screen: a state of D × V numbers in place of a cache that grows with each token.

Without the softmax a sum can be taken in another order, (q Kᵀ) V = q (Kᵀ V). So what a query needs of all tokens before
it is one matrix, the state S (Katharopoulos et al. 2020, section 3.2). A gate a ≤ 1 lets it fade. The delta rule writes
u, what is missing in S's answer to k, and not v itself (Schlag et al. 2021, section 4.2; both together: Yang et al.
2024, "Gated Delta Networks"). For each token t, with β the share that is written:

    S = a_t S_{t−1}        u_t = β_t (v_t − Sᵀ k_t)        S_t = S + k_t u_tᵀ        o_t = S_tᵀ q_t         recurrent
                           u_t = β_t v_t                   without the delta rule

What S answers to k_t was written by the tokens before t: a triangular system. With Γ_ij = a_{j+1} … a_i for j ≤ i, else
0, the fading from token j to token i, all u are found at once (Yang et al. 2024, "Parallelizing Linear Transformers
with the Delta Rule", section 3):

    (I + β K Kᵀ ∘ Γ, below the diagonal) U = β V        O = (Q Kᵀ ∘ Γ) U                                     parallel

That is T² numbers. So C tokens are computed in parallel, and between chunks goes the state, with γ_i = a_1 … a_i:

    (I + …) U = β (V − γ K S)        O = γ Q S + (Q Kᵀ ∘ Γ) U        S' = γ_C S + (K γ_C / γ)ᵀ U              chunked

FLOPs: T·(2 D·V + C·(D + V)) multiply-adds a head and a pass, about, and C²·V of the system a chunk: linear in T. Bytes
in training: a state for each chunk, T/C · D·V numbers, since each chunk is computed again in its backward. Bytes in
generation: D·V numbers, whatever the length.
"""

import math

import torch
from torch.utils.checkpoint import checkpoint


def recurrent(q_BHTD, k_BHTD, v_BHTV, log_a_BHT, beta_BHT, state_BHDV=None, delta=True):
    """Return (o, the state after the last token), token by token: the definition, and how a model writes text."""
    s_BHDV = empty_state(k_BHTD, v_BHTV) if state_BHDV is None else state_BHDV
    out = []
    for t in range(q_BHTD.shape[2]):
        s_BHDV = s_BHDV * log_a_BHT[:, :, t, None, None].exp()
        q_BH1D, k_BH1D, v_BH1V = (x[:, :, t : t + 1] for x in (q_BHTD, k_BHTD, v_BHTV))
        u_BH1V = (v_BH1V - k_BH1D @ s_BHDV * delta) * beta_BHT[:, :, t, None, None]
        s_BHDV = s_BHDV + k_BH1D.mT @ u_BH1V
        out.append(q_BH1D @ s_BHDV)
    return torch.cat(out, dim=2), s_BHDV


def chunk(q_BHCD, k_BHCD, v_BHCV, log_a_BHC, beta_BHC, s_BHDV, delta):
    """Return (o of C tokens, the state after them): C² numbers a head."""
    logs_BHC = log_a_BHC.cumsum(-1)  # ln γ
    later = torch.ones(q_BHCD.shape[2], q_BHCD.shape[2], dtype=torch.bool, device=q_BHCD.device).triu(1)
    fading_BHCC = (logs_BHC[..., :, None] - logs_BHC[..., None, :]).masked_fill(later, -math.inf).exp()  # Γ
    gamma_BHC1, beta_BHC1 = logs_BHC.exp().unsqueeze(-1), beta_BHC.unsqueeze(-1)
    u_BHCV = beta_BHC1 * v_BHCV
    if delta:
        missing_BHCV = u_BHCV - beta_BHC1 * ((gamma_BHC1 * k_BHCD) @ s_BHDV)
        system_BHCC = beta_BHC1 * (k_BHCD @ k_BHCD.mT) * fading_BHCC  # read below the diagonal, which counts as ones
        u_BHCV = torch.linalg.solve_triangular(system_BHCC, missing_BHCV, upper=False, unitriangular=True)
    out_BHCV = (gamma_BHC1 * q_BHCD) @ s_BHDV + ((q_BHCD @ k_BHCD.mT) * fading_BHCC) @ u_BHCV
    rest_BHC1 = (logs_BHC[..., -1:] - logs_BHC).exp().unsqueeze(-1)  # γ_C / γ
    return out_BHCV, gamma_BHC1[:, :, -1:] * s_BHDV + (rest_BHC1 * k_BHCD).mT @ u_BHCV


def parallel(q_BHTD, k_BHTD, v_BHTV, log_a_BHT, beta_BHT, delta=True):
    """Return o: all T tokens as one chunk, after an empty state."""
    return chunk(q_BHTD, k_BHTD, v_BHTV, log_a_BHT, beta_BHT, empty_state(k_BHTD, v_BHTV), delta)[0]


def chunked(q_BHTD, k_BHTD, v_BHTV, log_a_BHT, beta_BHT, state_BHDV=None, C=64, delta=True):
    """Return (o, the state after the last token), C tokens at a time. Autograd keeps what enters a chunk alone."""
    s_BHDV = empty_state(k_BHTD, v_BHTV) if state_BHDV is None else state_BHDV
    out = []
    for parts in zip(*(x.split(C, dim=2) for x in (q_BHTD, k_BHTD, v_BHTV, log_a_BHT, beta_BHT)), strict=True):
        out_BHCV, s_BHDV = checkpoint(chunk, *parts, s_BHDV, delta, use_reentrant=False)
        out.append(out_BHCV)
    return torch.cat(out, dim=2), s_BHDV


def empty_state(k_BHTD, v_BHTV):
    """Return zeros (B, H, D, V)."""
    return k_BHTD.new_zeros(*k_BHTD.shape[:2], k_BHTD.shape[3], v_BHTV.shape[3])
