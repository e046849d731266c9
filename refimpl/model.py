"""The GPT that every page uses: a decoder-only transformer that is GPT-2, LLaMA or GPT-NeoX, depending on its config.

Tensor names end with the shape: B batch, T queries, S keys, H query heads, G key/value heads, D head_dim, C hidden
(= H·D), V vocabulary. Parallelism, recomputation and precision are applied from outside and not known here.
"""

import inspect
import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from . import catalog

CHOICES = {"norm": ("layernorm", "rmsnorm"), "activation": ("gelu", "swiglu"), "positions": ("learned", "rotary")}
NUMBERS = (("dropout", 0, 1), ("norm_eps", 0, math.inf), ("rotary_base", 1, math.inf), ("rotary_fraction", 0, math.inf))


@dataclass(frozen=True)
class GPTConfig:
    """Describes a GPT. The defaults are GPT-2 small; `GPTConfig.named(…)` returns published models.

    Raises ValueError, with the field and its value, if the values do not describe a model.
    """

    vocab_size: int = 50257
    context_length: int = 1024
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many
    mlp_hidden: int | None = None  # None: 4 · hidden (dataclasses.replace keeps the number: pass None again)
    norm: str = "layernorm"  # or "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "gelu"  # the tanh approximation, as GPT-2 has it; or "swiglu"
    positions: str = "learned"  # or "rotary"
    rotary_fraction: float = 1.0  # the share of a head's dimensions that rotate; GPT-NeoX: 0.25
    rotary_base: float = 10000.0
    bias: bool = True  # of linear layers and LayerNorm
    tied: bool = True  # the output head is the token embedding
    parallel_residual: bool = False  # attention and MLP read the same x, as in GPT-NeoX
    dropout: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "mlp_hidden", 4 * self.hidden if self.mlp_hidden is None else self.mlp_hidden)
        for name in ("vocab_size", "context_length", "layers", "hidden", "heads", "kv_heads", "mlp_hidden"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:  # not isinstance: True is an int
                raise ValueError(f"{name}={getattr(self, name)!r}: expected an integer of at least 1")
        for name, low, high in NUMBERS:
            if not isinstance(getattr(self, name), (int, float)) or not low <= getattr(self, name) < high:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number in [{low}, {high})")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {' or '.join(map(repr, known))}")
        for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} is not a multiple of {part}={getattr(self, part)}")
        if self.positions == "rotary" and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_fraction={self.rotary_fraction} turns {self.rotary_dim} of a head's "
                             f"{self.head_dim} dimensions: expected an even number from 2 to {self.head_dim}")

    @classmethod
    def named(cls, name, **changes):
        """Return a published model (`catalog.model_names()`) with `changes`; an unknown name lists the close ones."""
        return cls(**{**catalog.model(name), **changes})

    @property
    def head_dim(self):
        """Return D, the size of one head."""
        return self.hidden // self.heads

    @property
    def rotary_dim(self):
        """Return how many of the D dimensions are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def parameter_count(self):
        """Return Ψ in closed form: embeddings + layers · (attention + MLP + two norms) + last norm (+ head if untied).

        Shared weights count once, so that it equals `sum(p.numel() for p in GPT(config).parameters())`.
        """
        C, M, b, kv = self.hidden, self.mlp_hidden, int(self.bias), self.kv_heads * self.head_dim
        norm = C * (1 + (self.norm == "layernorm" and self.bias))
        attention = (C + b) * (C + 2 * kv) + (C + b) * C  # q, k, v in one matrix; then the projection out
        mlp = (1 + (self.activation == "swiglu")) * (C + b) * M + (M + b) * C  # gate and up, or up alone; then down
        embeddings = (self.vocab_size + (self.context_length if self.positions == "learned" else 0)) * C
        head = 0 if self.tied else self.vocab_size * C
        return embeddings + self.layers * (attention + mlp + 2 * norm) + norm + head


def softmax_attention(q_BHTD, k_BGSD, v_BGSD, *, causal=False, dropout_p=0.0):
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


def _bind(attention, dropout):
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
    """Causal self-attention: q, k and v of x, then the given `attention` function, then the output projection."""

    def __init__(self, config, attention):
        super().__init__()
        self.config, self.attention, self.options = config, attention, _bind(attention, config.dropout)
        self.qkv = nn.Linear(config.hidden, config.hidden + 2 * config.kv_heads * config.head_dim, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x_BTC, rotation=None):
        (B, T, C), c = x_BTC.shape, self.config
        qkv = self.qkv(x_BTC).view(B, T, c.heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
        q_BHTD, k_BGTD, v_BGTD = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        if rotation is not None:  # under autocast the tables are fp32, and so is what they rotate
            q_BHTD, k_BGTD = (rotate(x, *rotation).to(v_BGTD.dtype) for x in (q_BHTD, k_BGTD))
        options = self.options if self.training or not c.dropout else {**self.options, "dropout_p": 0.0}
        out_BHTD = self.attention(q_BHTD, k_BGTD, v_BGTD, **options)
        return self.out(out_BHTD.transpose(1, 2).reshape(B, T, C))


def rotation_table(config):
    """Return cos and sin of position · base^(−2i/n) for i < n/2, n = rotary_dim: two (context_length, n) fp32 tables.

    RoFormer (Su et al. 2021), section 3.4.2, with the dimensions paired as halves, as GPT-NeoX pairs them.
    """
    n = config.rotary_dim
    frequency = config.rotary_base ** (-torch.arange(0, n, 2, dtype=torch.float32) / n)
    angle = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x_BHTD, cos_TN, sin_TN):
    """Rotate the first N dimensions of each head by its position's angle. The others stay the same."""
    n = cos_TN.shape[-1]
    turned, passed = x_BHTD[..., :n], x_BHTD[..., n:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos_TN + torch.cat((-second, first), dim=-1) * sin_TN
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned


class MLP(nn.Module):
    """The feed-forward layer: GELU(x W_up) W_down, or SwiGLU, (SiLU(x W_gate) ∘ x W_up) W_down (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        swiglu = config.activation == "swiglu"
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias) if swiglu else None
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=config.bias)

    def forward(self, x_BTC):
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


def norm_of(config):
    """Return the norm that a config names, over its hidden size."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A layer: x + attention(norm(x)), then x + MLP(norm(x)). With `parallel_residual` both read the same x."""

    def __init__(self, config, attention):
        super().__init__()
        self.norm1, self.attention = norm_of(config), Attention(config, attention)
        self.norm2, self.mlp = norm_of(config), MLP(config)
        self.parallel, self.dropout = config.parallel_residual, nn.Dropout(config.dropout)

    def forward(self, x_BTC, rotation=None):
        attended = self.dropout(self.attention(self.norm1(x_BTC), rotation))
        if self.parallel:
            return x_BTC + attended + self.dropout(self.mlp(self.norm2(x_BTC)))
        x_BTC = x_BTC + attended
        return x_BTC + self.dropout(self.mlp(self.norm2(x_BTC)))


class GPT(nn.Module):
    """A decoder-only transformer: `GPT(config)(tokens, targets)`.

    `attention`: any `(q_BHTD, k_BGSD, v_BGSD) -> out_BHTD`. If it has options `causal` and `dropout_p`, they are set.
    `dtype` and `device`: those of the parameters (default: torch's own defaults).
    """

    def __init__(self, config, attention=softmax_attention, *, dtype=None, device=None):
        super().__init__()
        self.config = config
        with built_in(dtype, device):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden)
            rotary = config.positions == "rotary"
            self.positions = None if rotary else nn.Embedding(config.context_length, config.hidden)
            if rotary:
                for name, table in zip(("cos", "sin"), rotation_table(config), strict=True):
                    self.register_buffer(name, table, persistent=False)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
            self.norm, self.head = norm_of(config), nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(self.initialize)

    def initialize(self, module):
        """Initialise as GPT-2: N(0, 0.02²), biases 0. Output projections of a block are smaller by √(2 · layers)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention.out, module.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens_BT, targets_BT=None, *, offset=0, reduction="mean"):
        """Map tokens (B, T) to logits (B, T, V), or to the cross-entropy ("mean" or "sum") with targets (B, T).

        A target of −100 is not counted. `offset`: the position of the first token, for a sequence fed in chunks.
        Raises TypeError for anything but tensors. Raises ValueError for a wrong shape or dtype, a sequence that exceeds
        the context, and on a CPU an id outside the vocabulary. (On a GPU such an id triggers a device-side assertion.)
        """
        T = self._check(tokens_BT, targets_BT, offset)
        x_BTC = self._lookup(self.embedding, tokens_BT, ids=tokens_BT, name="tokens")
        rotation = None
        if self.positions is None:
            rotation = [table[offset : offset + T].to(x_BTC.dtype) for table in (self.cos, self.sin)]
        else:
            x_BTC = x_BTC + self.positions(torch.arange(offset, offset + T, device=tokens_BT.device))
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation)
        logits_BTV = self.head(self.norm(x_BTC))
        if targets_BT is None:
            return logits_BTV
        return self._lookup(F.cross_entropy, logits_BTV.float().flatten(0, 1), targets_BT.flatten().long(),
                            ids=targets_BT, name="targets", reduction=reduction)

    def _lookup(self, function, *args, ids, name, **options):
        """Call `function`. If an id is outside the vocabulary, raise ValueError; no check is made beforehand."""
        try:
            return function(*args, **options)
        except IndexError as error:
            raise ValueError(f"{name} run from {ids.min()} to {ids.max()}: the vocabulary is 0…"
                             f"{self.config.vocab_size - 1}") from error

    def _check(self, tokens_BT, targets_BT, offset):
        for name, ids in (("tokens", tokens_BT), ("targets", tokens_BT if targets_BT is None else targets_BT)):
            if not isinstance(ids, torch.Tensor):
                raise TypeError(f"{name} as a {type(ids).__name__}: expected a tensor (B, T), torch.tensor([[…]])")
            if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
                raise ValueError(f"{name} of shape {tuple(ids.shape)}, {ids.dtype}: expected int64 or int32, (B, T)")
        if targets_BT is not None and targets_BT.shape != tokens_BT.shape:
            raise ValueError(f"targets of shape {tuple(targets_BT.shape)} for tokens of {tuple(tokens_BT.shape)}: "
                             "expected one target for each token")
        T = tokens_BT.shape[1]
        if not isinstance(offset, int) or not 0 <= offset <= self.config.context_length - T:
            raise ValueError(f"{T} tokens from position {offset}: the context has {self.config.context_length}")
        return T


@contextmanager
def built_in(dtype, device):
    """Build parameters in `dtype` and on `device` inside the context. None: torch's own defaults."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        with torch.device(device if device is not None else torch.get_default_device()):
            yield
    finally:
        torch.set_default_dtype(previous)
