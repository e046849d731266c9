"""What describes a GPT: its sizes, its parts, and how many parameters that makes. `refimpl.model` builds it."""

import math
from dataclasses import dataclass

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
