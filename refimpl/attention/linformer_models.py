"""Linformer as modules, and inside of encoders of transformers, from outside.

    LinformerAttention(512, 4096, 8, k=256)(x_BTC)      projections around `linformer_attention`
    linformer(model, k=128)                             each layer of a model gets its own E and F, and attends by them
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

from ..equivalence.comparison import CutDiffers, computed, difference
from ..equivalence.cut_over_ranks import whole_of
from ..equivalence.once_per_class import once
from ..model import GPT
from ..others import ask
from .flash import flash_attention
from .linformer_projection import WHY, check_share, linformer_attention, refuse_causal
from .masks import check_size

MASKED = (f"a mask that hides pairs of tokens, as a causal one or a window does: expected padding alone, (batch, "
          f"tokens), for Linformer, since {WHY}")


class LinformerProjection(nn.Module):
    """E and F of a layer, and attention by them: `LinformerProjection(seq_len, heads, k)(q, k, v)`.

    - `seq_len`: the longest sequence. `share`: "none" (each head has its own E and F), "heads" (all heads share E and
      F: the paper's headwise sharing), "kv" (F is E, too: key-value sharing).

    E and F begin as N(0, 1/k), so that EᵀE is 1 on average: k rows keep products of vectors over the tokens (Johnson
    and Lindenstrauss), which is how the paper's theorem 2 chooses them.
    """

    def __init__(self, seq_len: int, heads: int, k: int, share: str = "heads", *, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        check_share(share)
        for name, size in (("seq_len", seq_len), ("heads", heads), ("k", k)):
            check_size(name, size)
        shape = (heads, k, seq_len) if share == "none" else (k, seq_len)
        self.e, f = (nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=k**-0.5)) for _ in "ef")
        self.f = None if share == "kv" else f

    def forward(self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *,
                padding: torch.Tensor | None = None, causal: bool = False, scale: float | None = None,
                attention: Callable[..., torch.Tensor] = flash_attention) -> torch.Tensor:
        """Return `linformer_attention` of (q, k, v) by E and F, with its options."""
        return linformer_attention(q_BHTD, k_BGSD, v_BGSV, self.e, self.f, padding=padding, causal=causal, scale=scale,
                                   attention=attention)


class LinformerAttention(nn.Module):
    """Self-attention over k mixtures of up to seq_len tokens: `LinformerAttention(dim, seq_len, heads, k)(x_BTC)`.

    - `share`: as LinformerProjection takes it. `projection`: that of another layer, in place of an own one; so layers
      share E and F (the paper's layerwise sharing, with share="kv" in the first).
    - `bias`: of both linear layers. `attention`: as `linformer_attention` takes it.

    ValueError if heads do not divide dim, or for a projection of other sizes; and in calls for `causal`.
    """

    def __init__(self, dim: int, seq_len: int, heads: int, k: int, share: str = "heads", *, bias: bool = True,
                 projection: LinformerProjection | None = None,
                 attention: Callable[..., torch.Tensor] = flash_attention) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("heads", heads)):
            check_size(name, size)
        if dim % heads:
            raise ValueError(f"dim={dim}, heads={heads}: expected a multiple of heads")
        self.heads, self.attention = heads, attention
        self.projection = LinformerProjection(seq_len, heads, k, share) if projection is None else projection
        if self.projection.e.shape not in ((k, seq_len), (heads, k, seq_len)):
            raise ValueError(f"a projection of shape {tuple(self.projection.e.shape)}: expected {(k, seq_len)} or "
                             f"{(heads, k, seq_len)}, as of a layer with these sizes")
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, x_BTC: torch.Tensor, *others: torch.Tensor, padding: torch.Tensor | None = None,
                causal: bool = False) -> torch.Tensor:
        """Map x (B, T, C) to (B, T, C). `padding`: (B, T) booleans, True where a token is."""
        refuse_causal(causal)  # first: a GPT that is given this as its attention calls it with q, k, v and causal
        if others:
            raise TypeError(f"{1 + len(others)} tensors by position: expected x (B, T, C) alone, and padding by name")
        q, k, v = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out_BHTD = self.projection(q, k, v, padding=padding, attention=self.attention)
        return self.out(out_BHTD.transpose(1, 2).flatten(2))


# --- models ----------------------------------------------------------------------------------------------------------


def linformer(model: nn.Module, k: int, *, share: str = "heads", seq_len: int | None = None) -> nn.Module:
    """Give each attention layer of an encoder its own E and F, and let it attend by them, in place; returns the model.

    For encoders of transformers whose attention comes from their registry (AttentionInterface), as BERT and ViT. A
    layer's E and F are parameters of its module, `….linformer.e`: make the optimizer after this call. Padding counts as
    in `linformer_attention`, so that a sequence padded at its end gives what it gives alone. Before that a toy of the
    class, with E = F = 1, is held to what it computes by its own attention.

    - `seq_len`: the longest sequence, by default the config's max_position_embeddings.

    ValueError for a causal model, a decoder, and a model whose attention is not known; CutDiffers for one that would
    not compute the same; and in calls for dropout of attention's weights, cross-attention, and masks of pairs.
    """
    if isinstance(model, GPT):
        raise ValueError(f"{type(model).__name__} is causal: expected an encoder, since {WHY}")
    found = ask("encoder", model)
    if found is None:
        raise ValueError(f"how {type(model).__name__} computes attention is not known: call linformer_attention in its "
                         "attention by hand")
    config, (layers, give) = model.config.get_text_config(), found
    seq_len = getattr(config, "max_position_embeddings", None) if seq_len is None else seq_len
    if seq_len is None:
        raise ValueError(f"seq_len=None: expected the number of tokens, which {type(config).__name__} does not name")
    once("linformer", model.base_model, _prove)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for layer in layers:
        like = next(layer.parameters())
        layer.linformer = LinformerProjection(seq_len, heads, k, share, dtype=like.dtype, device=like.device)
    return give(model, _attend, MASKED)


def _attend(layer, q_BHTD, k_BGSD, v_BGSD, *, dropout_p, **options):
    if dropout_p:
        raise ValueError(f"dropout={dropout_p} of attention's weights: expected 0, Linformer drops none; set it to 0 "
                         "in the model's config")
    return layer.linformer(q_BHTD, k_BGSD, v_BGSD, **options)


def _prove(model):
    with torch.enable_grad():
        toy, _, tokens, whole = whole_of(model)
        given, met = copy.deepcopy(toy), set()
        layers, give = ask("encoder", given)

        def by_identity(layer, q_BHTD, k_BGSD, v_BGSD, *, dropout_p, **options):
            met.add(layer)
            return linformer_attention(q_BHTD, k_BGSD, v_BGSD, torch.eye(k_BGSD.shape[2]), **options)

        give(given, by_identity, MASKED)
        if differs := difference(whole, computed(given, lambda: ask("results", given, tokens))):
            raise CutDiffers(f"{type(model).__name__}, by Linformer with E = F = 1, would not compute what it does: "
                             f"{differs}, found on {ask('size', toy)}")
        if met != {*layers} or not met:
            raise ValueError(f"{type(model).__name__} takes attention from the registry of transformers in {len(met)} "
                             f"of {len(layers)} layers that name it, found on {ask('size', toy)}: call "
                             "linformer_attention in its attention by hand")
