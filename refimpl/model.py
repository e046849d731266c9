"""The GPT that every page uses: a decoder-only transformer that is GPT-2, LLaMA or GPT-NeoX, depending on its config.

Tensor names end with the shape: B batch, T queries, S keys, H query heads, G key/value heads, D head_dim, C hidden
(= H·D, unless the config says otherwise), V vocabulary. Parallelism, recomputation and precision are applied from
outside and not known here.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .config import GPTConfig as GPTConfig  # users import it from here
from .rotary import rotate, rotation_table


def softmax_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, *, causal: bool = False,
                      dropout_p: float = 0.0) -> torch.Tensor:
    """Return softmax(q kᵀ / √D) v, (B, H, T, D), with the whole T×S matrix in memory.

    Each key head serves H/G query heads, which become more rows of one matrix. `causal` is aligned bottom-right: the
    last query sees every key. Raises ValueError if G does not divide H, or if `causal` and T > S.
    """
    (B, H, T, D), (G, S) = q_BHTD.shape, k_BGSD.shape[1:3]
    if H % G or (causal and T > S):
        raise ValueError(f"{T} queries in {H} heads, {S} keys in {G}: expected H/G whole, and T ≤ S if causal")
    rows_BGRD = (q_BHTD * D**-0.5).reshape(B, G, H // G * T, D)
    k_BGSD, v_BGSD = k_BGSD.contiguous(), v_BGSD.contiguous()  # else autograd saves views, and with them all of qkv
    scores_BGRS = rows_BGRD @ k_BGSD.transpose(-2, -1)
    if causal:
        last_seen_R = torch.arange(S - T, S, device=q_BHTD.device).repeat(H // G)
        scores_BGRS.masked_fill_(torch.arange(S, device=q_BHTD.device) > last_seen_R[:, None], -math.inf)
    weights_BGRS = F.dropout(scores_BGRS.softmax(dim=-1), dropout_p)
    return (weights_BGRS @ v_BGSD).reshape(B, H, T, D)


def bind(attention: Callable[..., torch.Tensor], dropout: float) -> dict[str, Any]:
    """Return `causal` and `dropout_p` as options of `attention`, as far as it has them."""
    if attention is F.scaled_dot_product_attention:  # a builtin, which has no signature
        return {"is_causal": True, "dropout_p": dropout, "enable_gqa": True}
    try:
        taken = inspect.signature(getattr(attention, "forward", attention)).parameters
    except ValueError:  # another builtin, or a partial of one: call it without options
        taken = {}
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    fixed = getattr(attention, "keywords", {})  # a functools.partial fixes these
    ours = {"causal": True, "dropout_p": dropout}
    options = {k: v for k, v in ours.items() if k not in fixed and (k in taken or anything)}
    if dropout and "dropout_p" not in {**options, **fixed}:
        raise ValueError(f"dropout={dropout}, but {attention} takes no dropout_p: use dropout=0.0 or another attention")
    return options


class Attention(nn.Module):
    """Causal self-attention: q, k and v of x, then the given `attention` function, then the output projection.

    It has as many heads as `qkv` gives features for, so a part of the heads can be computed alone: with the rows of
    these heads in `qkv` (their q, then their k, then their v) and their columns in `out`, of which one part adds the
    bias. The sum of all parts is the whole. `queries_per_key`: query heads for each key head, H/G. Raises ValueError if
    `qkv` gives no whole number of key heads, each with its query heads.
    """

    def __init__(self, config: GPTConfig, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        self.set_attention(attention)
        self.queries_per_key = config.heads // config.kv_heads
        self.qkv = nn.Linear(config.hidden, config.q_hidden + 2 * config.kv_hidden, bias=config.has_qkv_bias)
        self.out = nn.Linear(config.q_hidden, config.hidden, bias=config.bias)

    def set_attention(self, attention: Callable[..., torch.Tensor]) -> None:
        """Use another attention function from now on."""
        self._modules.pop("attention", None)  # an attention may be a module, and the next one none
        self.attention, self.options = attention, bind(attention, self.config.dropout)

    def forward(self, x_BTC: torch.Tensor, rotation: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Map x (B, T, C) to (B, T, C). `rotation`: what `GPT.rotation` returns for x's positions."""
        c, qkv = self.config, self.qkv(x_BTC)
        heads, groups = self._heads_in(qkv.shape[-1])
        qkv = qkv.view(*qkv.shape[:2], heads + 2 * groups, c.head_dim).transpose(1, 2)
        q_BHTD, k_BGTD, v_BGTD = qkv.split([heads, groups, groups], dim=1)
        if rotation is not None:  # under autocast the tables are fp32, and so is what they rotate
            q_BHTD, k_BGTD = (rotate(x, *rotation).to(v_BGTD.dtype) for x in (q_BHTD, k_BGTD))
        options = self.options if self.training or not c.dropout else {**self.options, "dropout_p": 0.0}
        out_BHTD = self.attention(q_BHTD, k_BGTD, v_BGTD, **options)
        return self.out(out_BHTD.transpose(1, 2).flatten(2))

    def _heads_in(self, features):
        """Return how many query heads and key heads `features` of qkv are, H/G query heads for each key head."""
        queries, D = self.queries_per_key, self.config.head_dim
        groups, rest = divmod(features, (queries + 2) * D)
        if rest or not groups:
            raise ValueError(f"qkv gives {features} features: expected a multiple of {(queries + 2) * D}, "
                             f"{queries} query heads, a key head and a value head of {D} features each")
        return groups * queries, groups


class MLP(nn.Module):
    """The feed-forward layer: GELU(x W_up) W_down; or SwiGLU, (SiLU(x W_gate) ∘ x W_up) W_down, and GeGLU, with GELU in
    the place of SiLU (Shazeer 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh")}.get(config.activation)
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias) if config.gated else None
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=config.bias)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
        return self.down(self.activation(self.gate(x_BTC)) * self.up(x_BTC))


def norm_of(config: GPTConfig) -> nn.Module:
    """Return the norm that a config names, over its hidden size."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


def same(x: torch.Tensor) -> torch.Tensor:
    """Return x: what stands where a config has no norm."""
    return x


class Block(nn.Module):
    """A layer: x + attention(norm(x)), then x + MLP(norm(x)). With `parallel_residual` both read the same x; with
    `post_norms` what each of them returns is normed, too, before it is added.

    `block(x_BTC, rotation)`, with what `GPT.rotation` returns, maps x (B, T, C) to (B, T, C).
    """

    def __init__(self, config: GPTConfig, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm1, self.attention = norm_of(config), Attention(config, attention)
        self.norm2, self.mlp = norm_of(config), MLP(config)
        self.post1, self.post2 = (norm_of(config) if config.post_norms else same for _ in range(2))
        self.parallel, self.dropout = config.parallel_residual, nn.Dropout(config.dropout)

    def forward(self, x_BTC: torch.Tensor, rotation: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        attended = self.dropout(self.post1(self.attention(self.norm1(x_BTC), rotation)))
        if self.parallel:
            return x_BTC + attended + self.dropout(self.post2(self.mlp(self.norm2(x_BTC))))
        x_BTC = x_BTC + attended
        return x_BTC + self.dropout(self.post2(self.mlp(self.norm2(x_BTC))))


def cross_entropy(head: Callable[[torch.Tensor], torch.Tensor], x_BTC: torch.Tensor, targets_BT: torch.Tensor,
                  reduction: str) -> torch.Tensor:
    """Return the cross-entropy of head(x), the logits (B, T, V), at the targets (B, T). It is in fp32."""
    logits_BTV = head(x_BTC)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten().long(), reduction=reduction)


class GPT(nn.Module):
    """A decoder-only transformer: `GPT(config)(tokens, targets)`.

    `attention`: any `(q_BHTD, k_BGSD, v_BGSD) -> out_BHTD`. If it has options `causal` and `dropout_p`, they are set.
    `dtype` and `device`: those of the parameters (default: torch's own defaults).
    `loss`: how targets are scored, any `(head, x_BTC, targets_BT, reduction)`; the attribute can be set.

    Its forward is three parts, which a pipeline can call apart: `embed`, each block of `blocks` with `rotation`, and
    `predict`. A stage that has some of the blocks:

        x = model.embed(tokens) if first else received
        rotation = model.rotation(x)
        for block in mine:
            x = block(x, rotation)
        out = model.predict(x, targets) if last else x
    """

    def __init__(self, config: GPTConfig, attention: Callable[..., torch.Tensor] = softmax_attention, *,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config, self.loss = config, cross_entropy
        with built_in(dtype, device):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden)
            rotary = config.positions == "rotary"
            self.positions = None if rotary else nn.Embedding(config.context_length, config.hidden)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
            self.norm, self.head = norm_of(config), nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(self.initialize)

    def initialize(self, module: nn.Module) -> None:
        """Initialise as GPT-2: N(0, 0.02²), biases 0. Output projections of a block are smaller by √(2 · layers)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention.out, module.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None, *, offset: int = 0,
                positions_BT: torch.Tensor | None = None, reduction: str = "mean") -> torch.Tensor:
        """Map tokens (B, T) to logits (B, T, V), or to the cross-entropy ("mean" or "sum") with targets (B, T).

        A target of −100 is not counted. `offset`: the position of the first token, for a sequence fed in chunks.
        `positions_BT`: instead, that of each token, (B, T) or (1, T) ints; rotary ones are not held to the context.
        Raises TypeError for anything but tensors. Raises ValueError for a wrong shape or dtype, a sequence that exceeds
        the context, and on a CPU an id outside the vocabulary. (On a GPU such an id triggers a device-side assertion.)
        """
        self._check(tokens_BT, targets_BT, offset)
        x_BTC = self.embed(tokens_BT, offset=offset, positions_BT=positions_BT)
        rotation = self.rotation(x_BTC, offset=offset, positions_BT=positions_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation)
        return self.predict(x_BTC, targets_BT, reduction=reduction)

    def embed(self, tokens_BT: torch.Tensor, *, offset: int = 0,
              positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens (B, T) to x (B, T, C) for the first block: embeddings, plus learned positions if there are any,
        with dropout. Raises as `forward` does."""
        positions = self._positions(self._check(tokens_BT, None, offset), offset, positions_BT, tokens_BT)
        x_BTC = self._lookup(self.embedding, tokens_BT, ids=tokens_BT, name="tokens")
        if self.positions is not None:
            x_BTC = x_BTC + self._lookup(self.positions, positions, ids=positions, name="positions_BT")
        return self.dropout(x_BTC)

    def rotation(self, x_BTC: torch.Tensor, *, offset: int = 0,
                 positions_BT: torch.Tensor | None = None) -> Sequence[torch.Tensor] | None:
        """Return what each block takes beside x (B, T, C): cos and sin of its T positions, (T, rotary_dim) each, in x's
        dtype, with `positions_BT` (B, 1, T, rotary_dim); None if positions are learned. Raises as `forward` does."""
        T = self._check_positions(x_BTC.shape[1], offset)
        if self.config.positions == "learned":
            return None
        positions = self._positions(T, offset, positions_BT, x_BTC)
        tables = rotation_table(self.config, positions)
        return [(table if positions_BT is None else table[:, None]).to(x_BTC.dtype) for table in tables]

    def predict(self, x_BTC: torch.Tensor, targets_BT: torch.Tensor | None = None, *,
                reduction: str = "mean") -> torch.Tensor:
        """Map x (B, T, C) from the last block to logits (B, T, V), or with targets (B, T) to the cross-entropy: the
        last norm and the head. Raises as `forward` does."""
        x_BTC = self.norm(x_BTC)
        if targets_BT is None:
            return self.head(x_BTC)
        _check_ids("targets", targets_BT, x_BTC.shape[:2])
        return self._lookup(self.loss, self.head, x_BTC, targets_BT, reduction, ids=targets_BT, name="targets")

    def _lookup(self, function, *args, ids, name):
        """Call `function`. If an id is outside its table, raise ValueError; no check is made beforehand."""
        try:
            return function(*args)
        except IndexError as error:
            what, size = (("context", self.config.context_length) if name == "positions_BT" else
                          ("vocabulary", self.config.vocab_size))
            raise ValueError(f"{name} run from {ids.min()} to {ids.max()}: the {what} is 0…{size - 1}") from error

    def _positions(self, T, offset, positions_BT, like):
        """Return the positions of T tokens: (T,), or `positions_BT` as it is given."""
        if positions_BT is None:
            return torch.arange(offset, offset + T, device=like.device)
        rows = 1 if isinstance(positions_BT, torch.Tensor) and positions_BT.shape[:1] == (1,) else like.shape[0]
        _check_ids("positions_BT", positions_BT, (rows, T))
        return positions_BT

    def _check(self, tokens_BT, targets_BT, offset):
        _check_ids("tokens", tokens_BT)
        if targets_BT is not None:
            _check_ids("targets", targets_BT, tokens_BT.shape)
        return self._check_positions(tokens_BT.shape[1], offset)

    def _check_positions(self, T, offset):
        if not isinstance(offset, int) or not 0 <= offset <= self.config.context_length - T:
            raise ValueError(f"{T} tokens from position {offset}: the context has {self.config.context_length}")
        return T


def _check_ids(name, ids, shape=None):
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} as a {type(ids).__name__}: expected a tensor (B, T), torch.tensor([[…]])")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise ValueError(f"{name} of shape {tuple(ids.shape)}, {ids.dtype}: expected int64 or int32, (B, T)")
    if shape is not None and ids.shape != shape:
        raise ValueError(f"{name} of shape {tuple(ids.shape)} for tokens of {tuple(shape)}: "
                         "expected one for each token")


@contextmanager
def built_in(dtype: torch.dtype | None, device: torch.device | str | None) -> Iterator[None]:
    """Build parameters in `dtype` and on `device` inside the context. None: torch's own defaults."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        with torch.device(device if device is not None else torch.get_default_device()):
            yield
    finally:
        torch.set_default_dtype(previous)
