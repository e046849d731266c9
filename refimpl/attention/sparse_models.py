"""Block-sparse attention as modules, and inside of models: ours, and those of transformers from outside.

    OptimizedSparseAttention(512, 8, window_size=256)(x_BTC)      projections around `block_sparse_attention`
    sparse(model, lambda T: longformer_mask(T, 256, 4))           each layer of a model attends under this mask

A mask belongs to one length. A function of the length makes one where it is first met, and it is kept.
"""

import copy
import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..equivalence.comparison import CutDiffers, computed, difference
from ..equivalence.cut_over_ranks import whole_of
from ..equivalence.once_per_class import once
from ..model import GPT, Attention
from ..others import ask
from .block_sparse import block_sparse_attention
from .masks import BlockMask, causal_mask, check_size, longformer_mask
from .scores import Softcap


class MaskedAttention:
    """Attention of (q, k, v) under one mask, or under one for each length.

    - `mask`: a BlockMask, or a function of a length that returns one; `causal`: joined with a causal mask.
    - `kernel`: as `block_sparse_attention` takes it.
    """

    def __init__(self, mask: "BlockMask | Callable[[int], BlockMask]", causal: bool = False,
                 kernel: str = "auto") -> None:
        if not isinstance(mask, BlockMask) and not callable(mask):
            raise TypeError(f"mask={mask!r}: expected a BlockMask, or a function of the length that returns one")
        self._given, self.causal, self.kernel = mask, causal, kernel
        self.mask_for = functools.lru_cache(8)(self._mask_for)

    def _mask_for(self, T, causal, window=None):
        with _disable_current_modes():  # of a dry run: a mask of fake numbers has no lists
            return self._made(T, causal, window)

    def _made(self, T, causal, window):
        mask = self._given if isinstance(self._given, BlockMask) else self._given(T)
        if not isinstance(mask, BlockMask):
            raise TypeError(f"the function of the length returned a {type(mask).__name__} for {T}: expected a "
                            "BlockMask")
        if mask.shape[2:] != (T, T):
            raise ValueError(f"a mask of {mask.T} queries and {mask.S} keys with {T} tokens: expected a mask of this "
                             "length, or a function of it: lambda T: longformer_mask(T, …)")
        if window is not None:
            mask = mask & longformer_mask(T, window, causal=causal, block=mask.block)
        return mask & causal_mask(T, block=mask.block) if causal else mask

    @functools.cached_property
    def chunk(self) -> "Callable | None":
        """Return a function (first, end, length) → the attention of a chunk, tokens first … end − 1, over all keys so
        far, of a sequence of `length`; None if a query may see later keys."""
        return functools.lru_cache(1024)(lambda *places: functools.partial(
            block_sparse_attention, mask=self._rows(*places), kernel=self.kernel)) if self.causal else None

    def _rows(self, first, end, length):
        return self.mask_for(length, True).rows(first, end)

    def __call__(self, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> torch.Tensor:
        """Return (B, H, T, V)."""
        mask = self.mask_for(q_BHTD.shape[2], self.causal)
        return block_sparse_attention(q_BHTD, k_BGTD, v_BGTD, mask, kernel=self.kernel)


class OptimizedSparseAttention(nn.Module):
    """Self-attention over a window and global tokens: `OptimizedSparseAttention(hidden_size, num_heads)(x_BTC)`.

    - `window_size`: a token sees that many tokens on each side, before it alone if `causal`; `global_tokens`: the first
      so many see all, and all see them. `mask`: a function of the length, in place of these two.
    - `kv_heads`: by default as many as heads; `bias`: of both projections.

    ValueError if heads do not divide hidden_size, or kv_heads the heads.
    """

    def __init__(self, hidden_size: int, num_heads: int, window_size: int = 512, global_tokens: int = 0, *,
                 causal: bool = False, kv_heads: int | None = None, bias: bool = True,
                 mask: "Callable[[int], BlockMask] | None" = None) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads)):
            check_size(name, size)
        check_size("window_size", window_size, least=0)
        check_size("global_tokens", global_tokens, least=0)
        self.heads, self.kv_heads = num_heads, num_heads if kv_heads is None else kv_heads
        check_size("kv_heads", self.kv_heads)
        if hidden_size % num_heads or num_heads % self.kv_heads:
            raise ValueError(f"hidden_size={hidden_size}, num_heads={num_heads}, kv_heads={self.kv_heads}: expected "
                             "each to be a multiple of the next")
        self.head_dim = hidden_size // num_heads
        self.attention = MaskedAttention(mask or (lambda T: longformer_mask(
            T, window_size, min(global_tokens, T), causal=causal)), causal)
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Map x (B, T, C) to (B, T, C)."""
        qkv = self.qkv(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        out_BHTD = self.attention(*qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1))
        return self.out(out_BHTD.transpose(1, 2).flatten(2))


# --- models ----------------------------------------------------------------------------------------------------------


def sparse(model: nn.Module, mask: "BlockMask | Callable[[int], BlockMask]", kernel: str = "auto") -> nn.Module:
    """Let each attention of a causal language model look at the blocks of `mask` alone, in place; returns the model.

    For our GPT, and for models of transformers whose attention comes from their registry (AttentionInterface). A layer
    of theirs with a sliding window keeps it: both masks hold. Before that a toy of the class, under a full causal mask,
    is held to what it computes by its own attention.

    - `mask`: a BlockMask, for sequences of one length, or a function of the length. It is joined with a causal mask.
    - `kernel`: as `block_sparse_attention` takes it.

    TypeError for another mask. ValueError for a model whose attention is not known, or drops weights; CutDiffers for
    one that would not compute the same; and in calls for paddings, a cache, or sinks.
    """
    attention = MaskedAttention(mask, True, kernel)
    if isinstance(model, GPT):
        if model.config.dropout:
            raise ValueError(f"dropout={model.config.dropout}: expected 0, block-sparse attention drops no weights")
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_attention(attention)
        return model
    give = ask("attention", model)
    if give is None:
        raise ValueError(f"how {type(model).__name__} computes attention is not known: call block_sparse_attention in "
                         "its attention by hand")
    once("sparse attention", model, functools.partial(_prove, give=give))
    return give(model, _for_registry(attention))


def _for_registry(attention):
    def attend(q_BHTD, k_BGTD, v_BGTD, *, causal, scale, dropout_p, window, softcap, sinks):
        if dropout_p:
            raise ValueError(f"dropout={dropout_p} of attention's weights: expected 0, block-sparse attention drops "
                             "none")
        if sinks is not None:
            raise ValueError("an attention with sinks: expected one without, for a block-sparse mask")
        mask = attention.mask_for(q_BHTD.shape[2], attention.causal and causal, window)
        return block_sparse_attention(q_BHTD, k_BGTD, v_BGTD, mask, scale=scale, kernel=attention.kernel,
                                      score=None if softcap is None else Softcap(softcap))

    return attend


def _prove(model, give):
    with torch.enable_grad():
        toy, _, tokens, whole = whole_of(model)
        met = []  # lengths that its attention was asked for
        every = MaskedAttention(lambda T: met.append(T) or causal_mask(T, block=32), causal=True)
        given = give(copy.deepcopy(toy), _for_registry(every))
        if differs := difference(whole, computed(given, lambda: ask("results", given, tokens))):
            raise CutDiffers(f"{type(model).__name__}, by block-sparse attention under a full causal mask, would not "
                             f"compute what it does: {differs}, found on {ask('size', toy)}")
        if not met:
            raise ValueError(f"{type(model).__name__} takes no attention from the registry of transformers, found on "
                             f"{ask('size', toy)}: call block_sparse_attention in its attention by hand")
