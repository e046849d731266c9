"""Linformer: attention over k learned mixtures of all keys and values, linear in the sequence's length.

    K' = E K,  V' = F V                         (k, D) of (S, D): each row is a weighted sum of all S tokens
    O  = softmax(scale · Q K'ᵀ) V'              (T, k) weights, which `flash_attention` does not keep either

E and F are parameters of shape (k, n) for sequences of up to n tokens. A row of K' has a part of each token, the last
one too. So a query sees later tokens, and such an attention cannot be causal: it is for encoders.

Equation 7 of Linformer (Wang et al. 2020, arXiv:2006.04768), section 4, which also names the three ways of sharing.
"""

from collections.abc import Callable, Sequence

import torch

from .call.arguments import check_tensors, without_autocast
from .flash import flash_attention, flash_attention_bytes
from .reference import AttentionBytes, AttentionFlops, attention_flops

SHARE = ("none", "heads", "kv")
WHY = ("each of the k rows of E K is a sum over the whole sequence, so a query would see later tokens, and no mask of "
       "these k rows takes them out again")
CAUSAL = (f"causal=True for Linformer: expected False, since {WHY}; flash_attention and block_sparse_attention attend "
          "causally")


def linformer_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, e: torch.Tensor,
                        f: torch.Tensor | None = None, *, padding: torch.Tensor | None = None, causal: bool = False,
                        scale: float | None = None,
                        attention: Callable[..., torch.Tensor] = flash_attention) -> torch.Tensor:
    """Compute softmax(scale · q (E k)ᵀ) (F v): T queries over k rows. Returns (B, H, T, V) in q's dtype.

    - `e`, `f`: E and F, (k, n), or (G, k, n) for each key head its own; F is E by default. A sequence of S < n tokens
      takes their first S columns. Another dtype is cast to that of k and v, as autocast does with a weight.
    - `padding`: (B, S) booleans, True where a token is. The others' rows of k and v count as 0 before E, and their NaN
      too. It cannot be a mask of weights: one of the T × k weights belongs to all tokens together.
    - `attention`: of (q, E k, F v), with `scale` if it is given; `partial(flash_attention, kernel=…)` names a kernel.

    Autograd keeps E k and F v beside what `attention` keeps. ValueError for `causal`, for a sequence that is longer
    than n, and for shapes that do not fit.
    """
    refuse_causal(causal)
    check_tensors(q_BHTD, k_BGSD, v_BGSV)
    f = e if f is None else f
    _check_projections({"e": e, "f": f}, k_BGSD, padding)
    # cast out here, so that the cast's own backward gives E its gradient in E's dtype
    k_BGkD, v_BGkV = (_Projected.apply(by.to(x.dtype), x, padding) for by, x in ((e, k_BGSD), (f, v_BGSV)))
    return attention(q_BHTD, k_BGkD, v_BGkV, **({} if scale is None else {"scale": scale}))


def refuse_causal(causal):
    """Raise ValueError if `causal`, and say why."""
    if causal:
        raise ValueError(CAUSAL)


def _check_projections(named, k_BGSD, padding):
    B, G, S = k_BGSD.shape[:3]
    for name, x in named.items():
        if x.ndim not in (2, 3) or (x.ndim == 3 and len(x) != G) or x.shape[-2] != named["e"].shape[-2]:
            raise ValueError(f"{name} of shape {tuple(x.shape)}: expected (k, n), or ({G}, k, n) for {G} key heads, "
                             f"with the k of e, {tuple(named['e'].shape)}")
        if x.shape[-1] < S:
            raise ValueError(f"a sequence of {S} tokens and {name} of shape {tuple(x.shape)}, for at most "
                             f"{x.shape[-1]}: a longer sequence has no projection; cut it, or make one for {S} tokens")
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (B, S)):
        raise ValueError(f"padding of {padding.dtype} and shape {tuple(padding.shape)}: expected booleans of shape "
                         f"{(B, S)}, True where a token is")


class _Projected(torch.autograd.Function):
    """E x for each sequence, (B, G, k, D): autograd keeps E and x alone. A product that broadcasts E would make B · G
    gradients of its size before it sums them."""

    @staticmethod
    def forward(ctx, e, x_BGSD, there_BS):
        ctx.save_for_backward(e, x_BGSD, there_BS)
        (B, G, S, D), k = x_BGSD.shape, e.shape[-2]
        out_BGkD, e_GkS = x_BGSD.new_empty(B, G, k, D), e[..., :S].expand(G, k, S)
        with without_autocast(x_BGSD.device):
            for b in range(B):
                torch.bmm(e_GkS, _present(x_BGSD, there_BS, b), out=out_BGkD[b])
        return out_BGkD

    @staticmethod
    def backward(ctx, d_BGkD):
        e, x_BGSD, there_BS = ctx.saved_tensors
        de = dx_BGSD = None
        with without_autocast(d_BGkD.device):
            if ctx.needs_input_grad[0]:
                de = _outer(e, x_BGSD, there_BS, d_BGkD)
            if ctx.needs_input_grad[1]:
                dx_BGSD = _Projected.apply(e[..., :x_BGSD.shape[2]].mT, d_BGkD, None)
                if there_BS is not None:
                    dx_BGSD.masked_fill_(~there_BS[:, None, :, None], 0)
        return de, dx_BGSD, None


def _present(x_BGSD, there_BS, b):
    return x_BGSD[b] if there_BS is None else x_BGSD[b].masked_fill(~there_BS[b, :, None], 0)


def _outer(e, x_BGSD, there_BS, d_BGkD):
    """Return dE = Σ dY xᵀ over sequences, and over heads that share E."""
    de, S = e.new_zeros(e.shape), x_BGSD.shape[2]
    for b in range(len(x_BGSD)):
        d_GkD, x_GSD = d_BGkD[b], _present(x_BGSD, there_BS, b)
        if e.ndim == 3:
            de[..., :S].baddbmm_(d_GkD, x_GSD.mT)
        else:  # all heads in one product, which rounds once
            de[:, :S].addmm_(_token_by_token(d_GkD), _token_by_token(x_GSD).mT)
    return de


def _token_by_token(x_GSD):
    return x_GSD.transpose(0, 1).flatten(1)  # (S, G·D)


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


def linformer_flops(q_shape: Sequence[int], k_shape: Sequence[int], k: int, *,
                    v_dim: int | None = None) -> AttentionFlops:
    """Count the AttentionFlops of `linformer_attention` for shapes (B, H, T, D) and (B, G, S, D): those of attention
    over k keys (`attention_flops`), `pairs` = BHT·k, and those of E K and F V,

        forward    + 2 · k · BGS·(D + V)        backward (either)   + twice that: dE, dF, dK and dV
    """
    (B, G, S, D), V = k_shape, v_dim or q_shape[3]
    products = 2 * k * B * G * S * (D + V)
    flops = attention_flops(q_shape, (B, G, k, D), v_dim=v_dim)
    return AttentionFlops(flops.pairs, flops.forward + products, flops.backward + 2 * products,
                          flops.backward_recomputing + 2 * products)


def linformer_parameters(seq_len: int, heads: int, k: int, share: str = "heads") -> int:
    """Count the numbers in E and F of a layer: k · seq_len for each of 2 · heads matrices ("none"), 2 ("heads") or 1
    ("kv"). With layerwise sharing that is the whole model's."""
    check_share(share)
    return {"none": 2 * heads, "heads": 2, "kv": 1}[share] * k * seq_len


def linformer_bytes(q_shape: Sequence[int], k_shape: Sequence[int], k: int, dtype: torch.dtype = torch.float32, *,
                    seq_len: int | None = None, share: str = "heads", v_dim: int | None = None,
                    attention_bytes: Callable[..., AttentionBytes] = flash_attention_bytes) -> AttentionBytes:
    """Predict the AttentionBytes of `linformer_attention` for shapes (B, H, T, D) and (B, G, S, D), above E and F, too;
    exact for contiguous q, k and v, without padding, with S, k > 1. `seq_len`: n, by default S. `attention_bytes`:
    `flash_attention_bytes` where kernels run, and `tiled_attention_bytes` elsewhere. With elements of e bytes, P = k·n,
    times G if each head has its own (share="none"), and what attention takes over k keys:

        kept   attention's + e·BGk·(D + V)                  E K and F V
        peak   the most of
               attention's + e·BGk·(D + V)
               e·(BHT·(V + D) + BGk·(D + V) + P + max(BGS·V, c·V))           the output, dQ, d(E K), d(F V); dF, dV
               e·(BHT·(V + D) + BGk·D + BGS·V + 2P + max(BGS·D, c·D))        the output, dQ, d(E K), dV, dF; dE, dK

    c = G·(S + k) if heads share E and G > 1, else 0: keys and gradients of one sequence, token by token. So the slope
    in the sequence length is 1, and of k · n there are only gradients of E and F.
    """
    check_share(share)
    (B, H, T, D), (G, S), V, size = q_shape, k_shape[1:3], v_dim or q_shape[3], dtype.itemsize
    projected, of = size * B * G * k * (D + V), attention_bytes(q_shape, (B, G, k, D), dtype, v_dim=v_dim)
    copied = size * G * (S + k) * (share != "none" and G > 1)
    rows, keys = size * B * H * T * (V + D), size * B * G
    matrix = size * (seq_len or S) * k * (G if share == "none" else 1)
    values = rows + projected + matrix + max(keys * S * V, copied * V)
    both = rows + keys * (k * D + S * V) + 2 * matrix + max(keys * S * D, copied * D)
    return AttentionBytes(of.kept + projected, max(of.peak + projected, values, both))


def check_share(share):
    """Raise ValueError for a way of sharing that is none."""
    if share not in SHARE:
        raise ValueError(f"share={share!r}: expected one of {', '.join(map(repr, SHARE))}; layers share when one's "
                         "projection is given to the others: projection=first.projection")
