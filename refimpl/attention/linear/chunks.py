"""The gated delta rule in PyTorch, chunk by chunk: forward, and a backward that keeps a state for each chunk alone.

Symbols of `papers/linear_attention`: Γ_ij, the fading from token j to i; γ, that from the chunk's beginning; ρ = γ_C /
γ, that to its end. With A = β K Kᵀ ∘ Γ below the diagonal, R = β (V − γ K S) and P = Q Kᵀ ∘ Γ:

    (I + A) U = R                    O = γ Q S + P U                  S' = γ_C S + (ρ K)ᵀ U

    dU = Pᵀ dO + ρ K dS'             dP = dO Uᵀ                       dS = γ_C dS' + (γ Q)ᵀ dO − (γ K)ᵀ dV
    (I + A)ᵀ dR = dU                 dA = −dR Uᵀ                      dV = β dR
    dQ  = (dP ∘ Γ) K + γ dO Sᵀ
    dK' = (β dA ∘ Γ) K − γ dV Sᵀ     what comes to K where it stands beside γ
    dK" = (β dA ∘ Γ)ᵀ K + (dP ∘ Γ)ᵀ Q + ρ U dS'ᵀ          and beside 1/γ; dK = dK' + dK"

Each γ_i stands beside q_i or k_i, so that d ln γ = q·dQ + k·(dK' − dK"), row by row; γ_C also gets ⟨S', dS'⟩.
"""

import functools
from typing import NamedTuple

import torch

from ..call.dry_tiles import in_tiles
from ..call.sequences import tiles
from ..reference import wide_dtype


class Chunk(NamedTuple):
    """C tokens in fp32 or wider, copied: q is scaled; `k_k`: (K Kᵀ ∘ Γ)."""

    q: torch.Tensor  # (B, H, C, D)
    k: torch.Tensor
    v: torch.Tensor  # (B, H, C, V)
    beta: torch.Tensor  # (B, H, C, 1)
    gamma: torch.Tensor
    rest: torch.Tensor
    fading: torch.Tensor  # (B, H, C, C)


def load(x, rows, heads):
    """Copy the rows (first, end) of x, (B, G, T, …), for each of H heads: G divides H."""
    x = x[:, :, slice(*rows)]
    x = x.to(wide_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def chunk_of(tensors, rows, scale):
    """Load a Chunk of (q, k, v, log_decay, beta)."""
    heads = tensors[2].shape[1]
    q_BHCD, k_BHCD, v_BHCV, logs_BHC, beta_BHC = (load(x, rows, heads) for x in tensors)
    logs_BHC1 = logs_BHC.cumsum_(-1).unsqueeze(-1)
    fading_BHCC = (logs_BHC1 - logs_BHC1.mT).tril_().exp_().tril_()  # e^x of what is not used may overflow
    return Chunk(q_BHCD.mul_(scale), k_BHCD, v_BHCV, beta_BHC.unsqueeze(-1), logs_BHC1.exp(),
                 (logs_BHC1[:, :, -1:] - logs_BHC1).exp_(), fading_BHCC)


def written(c, s_BHDV, delta):
    """Return (V − γ K S, K Kᵀ ∘ Γ, A, U); without the delta rule (V, None, None, β V)."""
    if not delta:
        return c.v, None, None, c.v * c.beta
    missing_BHCV = c.v.sub_((c.k * c.gamma) @ s_BHDV)
    k_k_BHCC = (c.k @ c.k.mT).mul_(c.fading)
    system_BHCC = k_k_BHCC * c.beta
    return missing_BHCV, k_k_BHCC, system_BHCC, torch.linalg.solve_triangular(
        system_BHCC, missing_BHCV * c.beta, upper=False, unitriangular=True)


def after(c, s_BHDV, u_BHCV):
    """Make of a state, in place, the one after a chunk."""
    s_BHDV.mul_(c.gamma[:, :, -1:]).add_((c.k * c.rest).mT @ u_BHCV)


def start(state_BHDV, tensors):
    """Return a state that may be written to."""
    k, v = tensors[1:3]
    if state_BHDV is not None:
        return state_BHDV.to(wide_dtype(v.dtype), copy=True)
    return v.new_zeros((*v.shape[:2], k.shape[3], v.shape[3]), dtype=wide_dtype(v.dtype))


def forward(tensors, state_BHDV, call):
    """Return (out_BHTV, the state after the last token). `tensors`: q, k, v, log_decay, beta."""
    v_BHTV = tensors[2]
    out_BHTV, s_BHDV = torch.empty_like(v_BHTV, memory_format=torch.contiguous_format), start(state_BHDV, tensors)
    in_tiles("delta rule", [*tensors, out_BHTV, s_BHDV], call, functools.partial(
        _forward, tensors, out_BHTV, s_BHDV, call))
    return out_BHTV, s_BHDV


def _forward(tensors, out_BHTV, s_BHDV, call, is_new):
    for _, rows in _spans(tensors, call, is_new):
        _forward_chunk(chunk_of(tensors, rows, call.scale), s_BHDV, out_BHTV[:, :, slice(*rows)], call)


def _forward_chunk(c, s_BHDV, out_BHCV, call):
    u_BHCV = written(c, s_BHDV, call.delta)[-1]
    out_BHCV.copy_((c.q @ c.k.mT).mul_(c.fading) @ u_BHCV)
    out_BHCV.add_((c.q * c.gamma) @ s_BHDV)
    after(c, s_BHDV, u_BHCV)


def _spans(tensors, call, is_new):
    """List (which, (first, end)) of the chunks: in a dry run one of each length."""
    spans = enumerate(tiles((0, tensors[2].shape[2]), call.chunk))
    return [(n, rows) for n, rows in spans if is_new(rows[1] - rows[0])]


def backward(d_out_BHTV, d_last_BHDV, tensors, state_BHDV, call):
    """Return the gradients of q, k, v, log_decay, beta and the state."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    d_s_BHDV = start(d_last_BHDV, tensors)
    states = d_s_BHDV.new_empty(-(-tensors[2].shape[2] // call.chunk), *d_s_BHDV.shape)
    states[0] = 0 if state_BHDV is None else state_BHDV
    in_tiles("delta rule's backward", [d_out_BHTV, *tensors, *found, states], call, functools.partial(
        _backward, d_out_BHTV, d_s_BHDV, tensors, states, found, call))
    return *found, d_s_BHDV


def _backward(d_out_BHTV, d_s_BHDV, tensors, states, found, call, is_new):
    spans = _spans(tensors, call, is_new)
    for n, rows in spans[:-1]:  # the state before each chunk, again
        states[n + 1] = states[n]
        _advance(chunk_of(tensors, rows, call.scale), states[n + 1], call)
    for n, rows in reversed(spans):
        d_out_BHCV = load(d_out_BHTV, rows, d_out_BHTV.shape[1])
        gradients = _gradients(chunk_of(tensors, rows, call.scale), states[n], d_out_BHCV, d_s_BHDV, call)
        for x, gradient in zip(found, gradients, strict=True):
            _store(x, rows, gradient)
        del gradients, gradient, d_out_BHCV  # else they are in memory beside the next chunk


def _advance(c, s_BHDV, call):
    after(c, s_BHDV, written(c, s_BHDV, call.delta)[-1])


def _gradients(c, s_BHDV, d_out_BHCV, d_s_BHDV, call):
    """Return the gradients of a chunk's q, k, v, log_decay and beta; make of dS' dS, in place."""
    missing_BHCV, k_k_BHCC, system_BHCC, u_BHCV = written(c, s_BHDV, call.delta)
    d_right_BHCV = (c.q @ c.k.mT).mul_(c.fading).mT @ d_out_BHCV
    d_right_BHCV += (c.k * c.rest) @ d_s_BHDV  # dU
    if call.delta:
        d_right_BHCV = torch.linalg.solve_triangular(system_BHCC.mT, d_right_BHCV, upper=True, unitriangular=True)
    del system_BHCC
    d_beta_BHC = (d_right_BHCV * missing_BHCV).sum(-1)
    d_v_BHCV = d_right_BHCV * c.beta
    d_scores_BHCC = (d_out_BHCV @ u_BHCV.mT).mul_(c.fading)
    d_q_BHCD = (d_scores_BHCC @ c.k).add_((d_out_BHCV @ s_BHDV.mT).mul_(c.gamma))
    d_k_BHCD = (u_BHCV @ d_s_BHDV.mT).mul_(c.rest)
    d_last_BH = (d_k_BHCD * c.k).sum((-2, -1))
    d_last_BH += (s_BHDV * d_s_BHDV).sum((-2, -1)).mul_(c.gamma[:, :, -1, 0])
    d_k_BHCD += d_scores_BHCC.mT @ c.q
    del d_scores_BHCC
    d_s_BHDV.mul_(c.gamma[:, :, -1:]).add_((c.q * c.gamma).mT @ d_out_BHCV)
    d_logs_BHC = (c.q * d_q_BHCD).sum(-1)
    d_logs_BHC -= (c.k * d_k_BHCD).sum(-1)
    d_logs_BHC[:, :, -1] += d_last_BH
    if call.delta:
        d_s_BHDV -= (c.k * c.gamma).mT @ d_v_BHCV
        d_system_BHCC = (d_right_BHCV @ u_BHCV.mT).neg_().tril_(-1)
        d_beta_BHC += (d_system_BHCC * k_k_BHCC).sum(-1)
        d_k_k_BHCC = d_system_BHCC.mul_(c.fading).mul_(c.beta)
        beside_BHCD = (d_k_k_BHCC @ c.k).sub_((d_v_BHCV @ s_BHDV.mT).mul_(c.gamma))
        d_k_BHCD += beside_BHCD
        d_logs_BHC += (c.k * beside_BHCD).sum(-1)
        beside_BHCD = d_k_k_BHCC.mT @ c.k
        d_k_BHCD += beside_BHCD
        d_logs_BHC -= (c.k * beside_BHCD).sum(-1)
    return d_q_BHCD.mul_(call.scale), d_k_BHCD, d_v_BHCV, d_logs_BHC.flip(-1).cumsum_(-1).flip(-1), d_beta_BHC


def _store(x, rows, chunk):
    """Write a chunk of H heads to rows of x: heads of a group are summed."""
    place = x[:, :, slice(*rows)]
    place.copy_(chunk.unflatten(1, (place.shape[1], -1)).sum(2) if chunk.shape[1] != place.shape[1] else chunk)


# --- bytes -----------------------------------------------------------------------------------------------------------


def chunk_numbers(C, D, V, delta):
    """Return how many numbers a chunk takes for each head at the peaks of (forward, backward), besides states."""
    loaded = 2 * C * D + C * V + 3 * C + C * C
    system = C * C * delta  # K Kᵀ ∘ Γ, and as much A
    forward = max(2 * system + 2 * C * V, C * C + 2 * C * V, C * D + 2 * C * V, C * V + C * D + D * V)
    right = 3 * C * V + system + C  # U, dR, dV; K Kᵀ ∘ Γ; dβ
    both = right + 2 * C * D + 1  # dQ, dK, and what γ_C gets
    backward = max(
        C * V + 2 * system + C * C + C * V, 3 * C * V + 2 * system + C * D,  # dU
        right + C * C + 3 * C * D + 1, right + C * C + 2 * C * D + D * V + 2,  # dP beside dQ and dK
        both + C * D + max(2 * C, D * V + C * delta),  # dS, and d ln γ
        delta * (both + C + C * C + max(C * C, 2 * C * D) + C))  # dA
    return loaded + forward, loaded + C * V + backward
