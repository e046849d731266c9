"""The unit sizes of a model and a batch, in bytes, as polynomials of the sequence length."""

from ..memory import block_terms
from ..memory.activation_bytes import kept_on, norm_terms
from .polynomial import Quadratic


class Sizes:
    """What the lines of a training step are made of. Quadratics for what grows with s, integers for weights.

    U, K, Q, F, S, V, V4: see `step`. `context`: the model's context length, a Quadratic. `flash`: attention in a fused kernel, which keeps no scores.
    """

    def __init__(self, config, batch, context, dtype, device="cpu", flash=False, recompute=False):
        self.config, self.batch, self.dtype, self.device = config, batch, dtype, device
        self.flash, self.recompute = flash, recompute
        self.e, self.dropout = dtype.itemsize, int(config.dropout > 0)
        self.h, self.f, self.kv = config.hidden, config.mlp_hidden, config.kv_heads * config.head_dim
        self.kernels = kept_on(device, self.e)
        token = self.e * batch
        self.U, self.K, self.F = (Quadratic(b=token * width) for width in (self.h, self.kv, self.f))
        self.Q, self.S = self.U + 2 * self.K, Quadratic(a=token * config.heads)
        self.V, self.V4 = (Quadratic(b=size * batch * config.vocab_size) for size in (self.e, 4))
        self.causal = Quadratic(a=config.heads // config.kv_heads)
        self.token_mask = Quadratic(b=self.kernels.mask * batch * self.h * self.dropout)
        self.score_mask = Quadratic(a=self.kernels.mask * batch * config.heads * self.dropout)
        self._norm_sizes()
        self._attention_sizes()
        self.embedding = self.e * config.vocab_size * self.h
        self.positions = context * (self.e * self.h)
        self.random_state = Quadratic(c=self.dropout * (16 if str(device).startswith("cuda") else 5056))  # of a region

    def _norm_sizes(self):
        """What a norm keeps besides its output. In pieces, it works in `wide_U`; `copies_input`: that is a copy."""
        c = self.config
        kept = norm_terms(c, self.batch, self.e, self.kernels)
        self.norm_kept = Quadratic(b=sum(kept.values()))
        self.norm_weight = self.e * self.h * (1 + (c.norm == "layernorm" and c.bias))
        self.pieces = c.norm == "rmsnorm" and not self.kernels.fused_rms
        self.copies_input = self.pieces and self.e < 4
        self.wide_U = Quadratic(b=max(4, self.e) * self.batch * self.h)
        self.per_token = Quadratic(b=max(4, self.e) * self.batch)

    def _attention_sizes(self):
        """`fused`: what the fused kernel keeps; `projected`: what the projection keeps that is not the kernel's."""
        c = self.config
        rotary = c.positions == "rotary"
        self.part = rotary and c.rotary_dim < c.head_dim  # then q and k are laid out anew, and the output like them
        self.core = self.U + 2 * self.K + self.causal + self.S * (1 + self.dropout) + self.score_mask
        self.projected = self.U if self.part or not self.flash else Quadratic()
        self.fused = self.Q + (self.U + self.K) * rotary + self.U + Quadratic(b=4 * self.batch * c.heads)

    @property
    def block_kept(self):
        """What one block keeps: `memory.block_terms`, in which a fused kernel replaces the dense core."""
        def dense(s):
            return sum(block_terms(self.config, self.batch, s, self.dtype, self.device).values())

        kept = Quadratic.through(dense)
        if not self.flash:
            return kept
        return kept - self.core - self.U + self.fused + self.projected

    @property
    def rotation(self):
        """cos and sin of each position in the type of the activations, where that is not theirs."""
        return Quadratic(b=2 * self.e * self.config.rotary_dim * (self.e != 4)) * (self.config.positions == "rotary")

    @property
    def around(self):
        """What is kept beside the blocks and the head, from the embeddings on."""
        positions = Quadratic(b=8 * (self.config.positions == "learned"))
        return positions + self.rotation + self.token_mask
