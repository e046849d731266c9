"""A transformer block with FlashAttention in it, and what it keeps for backward.

    x = x + attention(norm(x))          pre-norm: a copy is normalised,
    x = x + MLP(norm(x))                the residual stream itself passes through the block

`refimpl.model`'s block with dense attention keeps tensors that grow with s². This one keeps one logsumexp per row
instead: the bytes of a layer are linear in the sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.activation_bytes import block_terms
from ..model import MLP, GPTConfig, bind, built_in, norm_of
from ..rotary import rotate, rotation_table
from .call.arguments import check_cu_seqlens
from .flash import flash_attention

OPTIONS = {"norm", "norm_eps", "activation", "bias", "qkv_bias", "head_dim", "rotary_fraction", "rotary_base"}
QUADRATIC = ("causal mask", "softmax output", "softmax dropout mask", "softmax dropout output")


class FlashTransformerBlock(nn.Module):
    """A causal transformer layer: `FlashTransformerBlock(hidden, heads)(x_BTC) -> x_BTC`.

    - `kv_heads`: key and value heads, by default as many as heads; `mlp_hidden`: by default 4 · hidden.
    - `window`: a token sees that many tokens before it, besides itself; by default all.
    - `rotary`: rotary positions, for sequences up to that length; by default none (the model adds its own).
    - `dropout`: of attention weights and of the output of both branches, while training.
    - `attention`: by default `flash_attention`; another function of (q, k, v), which gets `causal` and `dropout_p` if
      it has these options: `MaskedAttention(mask, causal=True)`, PyTorch's scaled_dot_product_attention, one of yours.
    - `options`: others of `GPTConfig` that concern a layer: norm, norm_eps, activation, bias, qkv_bias, head_dim,
      rotary_fraction, rotary_base.

    Its parts have the names of those in `refimpl.model`'s block. Raises TypeError for other options, and ValueError as
    `GPTConfig` does, for a window or dropout that `attention` does not have, and for packed sequences by another one.
    """

    def __init__(self, hidden: int, heads: int, *, kv_heads: int | None = None, mlp_hidden: int | None = None,
                 window: int | None = None, rotary: Any = None, dropout: float = 0.0,
                 attention: Callable[..., torch.Tensor] | None = None, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None, **options: Any) -> None:
        super().__init__()
        if unknown := set(options) - OPTIONS:
            raise TypeError(f"FlashTransformerBlock({', '.join(sorted(unknown))}=…): expected options among "
                            f"{sorted(OPTIONS)}; all others of GPTConfig are the model's")
        self.config = config = GPTConfig(
            vocab_size=1, hidden=hidden, heads=heads, kv_heads=kv_heads, mlp_hidden=mlp_hidden, dropout=dropout,
            layers=1, context_length=1 if rotary is None else rotary,
            positions="learned" if rotary is None else "rotary", **options)
        with built_in(dtype, device):
            self.norm1, self.attention = norm_of(config), FlashSelfAttention(config, window, attention)
            self.norm2, self.mlp, self.dropout = norm_of(config), MLP(config), nn.Dropout(dropout)

    def forward(self, x_BTC: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer. `cu_seqlens`: sequences packed one after the other in a batch of 1, as in `flash_attention`;
        each sees only itself, and its positions begin at 0."""
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC), cu_seqlens))
        return x_BTC + self.dropout(self.mlp(self.norm2(x_BTC)))


class EnhancedTransformerBlock(FlashTransformerBlock):
    """A FlashTransformerBlock that hands on its last branch and the residual apart: (branch, residual), whose sum is
    what the plain block returns. The next norm can add them as it reads them. Takes what the plain block takes."""

    def forward(self, x_BTC: torch.Tensor,
                cu_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer; returns (branch, residual)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC), cu_seqlens))
        return self.dropout(self.mlp(self.norm2(x_BTC))), x_BTC


class FlashSelfAttention(nn.Module):
    """The attention of a `FlashTransformerBlock`: one matrix for q, k and v, `flash_attention`, one matrix out."""

    def __init__(self, config, window, attention=None):
        super().__init__()
        if attention is not None and window is not None:
            raise ValueError(f"window={window} with attention={attention!r}: expected one of the two; the attention "
                             "has a mask of its own")
        # an attribute, as the model's: others may replace it
        self.config, self.window, self.attention = config, window, attention or flash_attention
        self.options = None if attention is None else bind(attention, config.dropout)
        self.qkv = nn.Linear(config.hidden, config.q_hidden + 2 * config.kv_hidden, bias=config.has_qkv_bias)
        self.out = nn.Linear(config.q_hidden, config.hidden, bias=config.bias)
        if config.positions == "rotary":
            for name, table in zip(("cos", "sin"), rotation_table(config), strict=True):
                # not persistent: the config gives them again
                self.register_buffer(name, table.to(self.qkv.weight.dtype), persistent=False)

    def forward(self, x_BTC, cu_seqlens=None):
        (B, T, _), c = x_BTC.shape, self.config
        qkv = self.qkv(x_BTC).view(B, T, c.heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
        q_BHTD, k_BGTD, v_BGTD = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        if c.positions == "rotary":
            positions = positions_in(cu_seqlens, B, T, c.context_length, x_BTC.device)
            rotation = [table[positions].to(x_BTC.dtype) for table in (self.cos, self.sin)]
            q_BHTD, k_BGTD = (rotate(x, *rotation).to(v_BGTD.dtype) for x in (q_BHTD, k_BGTD))  # fp32 under autocast
            v_BGTD = v_BGTD.clone()  # else autograd saves a view, and with it the whole of qkv before the rotation
        if self.options is None:
            options = {"causal": True, "window": self.window, "cu_seqlens": cu_seqlens, "dropout_p": c.dropout}
        elif cu_seqlens is not None:
            raise ValueError(f"cu_seqlens with attention={self.attention!r}: expected none; packed sequences are for "
                             "flash_attention, or documents_mask has them")
        else:
            options = self.options
        if c.dropout and not self.training:
            options = options | {"dropout_p": 0.0}
        out_BHTD = self.attention(q_BHTD, k_BGTD, v_BGTD, **options)
        return self.out(out_BHTD.transpose(1, 2).reshape(B, T, c.q_hidden))


def positions_in(cu_seqlens, B, T, rotary, device):
    """Return each token's position in its own sequence: a slice, or (T,) ints if sequences are packed. Raises
    ValueError for a sequence longer than `rotary`: on a GPU the index out of range would end the process."""
    ends = [0, T] if cu_seqlens is None else check_cu_seqlens("cu_seqlens", cu_seqlens, T, B)
    lengths = [end - first for first, end in zip(ends, ends[1:], strict=False)]
    if max(lengths) > rotary:
        raise ValueError(f"a sequence of {max(lengths)} tokens with rotary={rotary}: expected none longer; build the "
                         f"block with rotary={max(lengths)} or more")
    if cu_seqlens is None:
        return slice(0, T)
    ends = torch.tensor(ends, device=device)  # from a list: nothing is read back from the device
    # output_size: else a GPU is asked how long the result is
    return torch.arange(T, device=device) - ends[:-1].repeat_interleave(ends.diff(), output_size=T)


def flash_block_terms(config: GPTConfig, batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                      device: torch.device | str = "cpu") -> dict[str, int]:
    """Predict the bytes that a `FlashTransformerBlock` of this config keeps for backward: {term: bytes}. They are also
    those of a GPT's block with `flash_attention` and learned positions.

        dense block − e·abs² − (a/g)·s² + 4·abs          no dropout

    that is `memory.block_terms` without its terms in s², with the logsumexp in their place (and with dropout a seed of
    8 bytes). A packed batch of n sequences has 8·(n + 1) more, and with rotary positions cos and sin of each token.
    Raises ValueError as `block_terms` does.
    """
    terms = block_terms(config, batch, sequence, dtype, device)
    terms = {name: nbytes for name, nbytes in terms.items() if name not in QUADRATIC}
    terms["logsumexp"] = 4 * batch * config.heads * sequence  # fp32 in any precision
    return terms | ({"dropout seed": 8} if config.dropout else {})
