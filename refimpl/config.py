"""What describes a GPT: its sizes, its parts, and how many parameters that makes. `refimpl.model` builds it."""

import math
from dataclasses import dataclass
from typing import Any, Self

from . import catalog

CHOICES = {"norm": ("layernorm", "rmsnorm"), "activation": ("gelu", "swiglu", "geglu"),
           "positions": ("learned", "rotary")}
SIZES = ("vocab_size", "context_length", "layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden")
NUMBERS = (("dropout", 0, 1), ("norm_eps", 0, math.inf), ("rotary_base", 1, math.inf), ("rotary_fraction", 0, math.inf))


class _Derived(int):
    """A size that follows from others. In a copy with other sizes (`dataclasses.replace`) it follows from those."""


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
    head_dim: int | None = None  # D, the size of one head; None: hidden / heads. Gemma 2: 256, with heads · D > hidden
    mlp_hidden: int | None = None  # None: 4 · hidden (dataclasses.replace keeps the number: pass None again)
    norm: str = "layernorm"  # or "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "gelu"  # the tanh approximation, as GPT-2 has it; or with a gate "swiglu", "geglu"
    positions: str = "learned"  # or "rotary"
    rotary_fraction: float = 1.0  # the share of a head's dimensions that rotate; GPT-NeoX: 0.25
    rotary_base: float = 10000.0
    bias: bool = True  # of linear layers and LayerNorm
    qkv_bias: bool = False  # with bias=False: of q, k and v alone, as in Qwen 2
    post_norms: bool = False  # a norm after attention and after the MLP, too, before they are added, as in Gemma 2
    tied: bool = True  # the output head is the token embedding
    parallel_residual: bool = False  # attention and MLP read the same x, as in GPT-NeoX
    dropout: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "mlp_hidden", 4 * self.hidden if self.mlp_hidden is None else self.mlp_hidden)
        if self.head_dim is None or isinstance(self.head_dim, _Derived):
            object.__setattr__(self, "head_dim", self._even_head())
        for name in SIZES:
            if type(getattr(self, name)) not in (int, _Derived) or getattr(self, name) < 1:  # True is an int, too
                raise ValueError(f"{name}={getattr(self, name)!r}: expected an integer of at least 1")
        for name, low, high in NUMBERS:
            if not isinstance(getattr(self, name), (int, float)) or not low <= getattr(self, name) < high:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number in [{low}, {high})")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {' or '.join(map(repr, known))}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.positions == "rotary" and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_fraction={self.rotary_fraction} turns {self.rotary_dim} of a head's "
                             f"{self.head_dim} dimensions: expected an even number from 2 to {self.head_dim}")

    @classmethod
    def named(cls, name: str, **changes: Any) -> Self:
        """Return a published model (`catalog.model_names()`) with `changes`; an unknown name lists the close ones."""
        return cls(**{**catalog.model(name), **changes})

    def _even_head(self):
        """Return hidden / heads. A size that is no number is left for the check of all sizes to name."""
        if not all(type(size) is int and size > 0 for size in (self.hidden, self.heads)):
            return _Derived(1)
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}: give head_dim, the size "
                             "of one head, if it is another")
        return _Derived(self.hidden // self.heads)

    @property
    def q_hidden(self) -> int:
        """Return H · D, the features of all query heads; hidden, unless `head_dim` says otherwise."""
        return self.heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Return G · D, the features of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Tell whether the MLP has a gate beside its up projection."""
        return self.activation != "gelu"

    @property
    def has_qkv_bias(self) -> bool:
        """Tell whether q, k and v have a bias."""
        return self.bias or self.qkv_bias

    @property
    def norms(self) -> int:
        """Return how many norms a layer has: 2, with `post_norms` 4."""
        return 4 if self.post_norms else 2

    @property
    def rotary_dim(self) -> int:
        """Return how many of the D dimensions are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def layer_parameters(self) -> dict[str, int]:
        """Return the parameters of one layer in closed form, {part: count}: "qkv", "out", "up" (with the gate), "down"
        and "norms"."""
        C, Q, KV, M, b = self.hidden, self.q_hidden, self.kv_hidden, self.mlp_hidden, int(self.bias)
        return {"qkv": (C + self.has_qkv_bias) * (Q + 2 * KV), "out": (Q + b) * C, "up": (1 + self.gated) * (C + b) * M,
                "down": (M + b) * C, "norms": self.norms * self.norm_parameters()}

    def norm_parameters(self) -> int:
        """Return the parameters of one norm: a weight and, of a LayerNorm with `bias`, a bias."""
        return self.hidden * (1 + (self.norm == "layernorm" and self.bias))

    def parameter_count(self) -> int:
        """Return Ψ in closed form: embeddings + layers · (attention + MLP + norms) + last norm (+ head if untied).

        Shared weights count once, so that it equals `sum(p.numel() for p in GPT(config).parameters())`.
        """
        embeddings = (self.vocab_size + (self.context_length if self.positions == "learned" else 0)) * self.hidden
        head = 0 if self.tied else self.vocab_size * self.hidden
        return embeddings + self.layers * sum(self.layer_parameters().values()) + self.norm_parameters() + head
