"""The unit sizes of a model and a batch, in bytes, as polynomials of the sequence length."""

from ..memory import block_terms
from ..memory.activation_bytes import kept_on, norm_terms
from .polynomial import Quadratic

SEQUENCE = Quadratic(b=1)


class Sizes:
    """What the lines of a training step are made of. Quadratics for what grows with s, integers for weights.

    U, K, Q, F, S, V, V4: see `step`. `context`: the model's context length, a Quadratic. `flash`: attention in a fused
    kernel, which keeps no scores. `tokens`, `keys`: both s, but for a chunk of t tokens that attends to k keys, which
    are `carried` for it; if it is `masked`, a fused kernel is given a mask, one for all blocks.
    """

    def __init__(self, config, batch, context, dtype, device="cpu", flash=False, recompute=False, tokens=SEQUENCE,
                 keys=SEQUENCE, carried=False, masked=False):
        self.config, self.batch, self.dtype, self.device = config, batch, dtype, device
        self.flash, self.recompute, self.carried = flash, recompute, carried
        self.e, self.dropout = dtype.itemsize, int(config.dropout > 0)
        self.h, self.f, self.kv = config.hidden, config.mlp_hidden, config.kv_heads * config.head_dim
        self.kernels = kept_on(device, self.e)
        self.tokens, element, scores = tokens, self.e * batch, tokens * keys * (batch * config.heads)
        self.U, self.K, self.F = (tokens * (element * width) for width in (self.h, self.kv, self.f))
        self.Q, self.S, self.all_K = self.U + 2 * self.K, scores * self.e, keys * (element * self.kv)
        self.V, self.V4 = (tokens * (size * batch * config.vocab_size) for size in (self.e, 4))
        self.causal = tokens * keys * (config.heads // config.kv_heads)
        self.token_mask = tokens * (self.kernels.mask * batch * self.h * self.dropout)
        self.score_mask = scores * (self.kernels.mask * self.dropout)
        self._norm_sizes()
        self._attention_sizes(keys)
        self.mask = tokens * keys * (self.e * (masked and flash))
        self.embedding, self.positions = self.e * config.vocab_size * self.h, context * (self.e * self.h)
        state = 16 if str(device).startswith("cuda") else 5056
        self.random_state = Quadratic(c=self.dropout * recompute * state)  # of each region

    def _norm_sizes(self):
        """What a norm keeps besides its output. In pieces, it works in `wide_U`; `copies_input`: that is a copy."""
        c, wide = self.config, max(4, self.e)
        self.norm_kept = self.tokens * sum(norm_terms(c, self.batch, self.e, self.kernels).values())
        self.norm_weight = self.e * self.h * (1 + (c.norm == "layernorm" and c.bias))
        self.pieces = c.norm == "rmsnorm" and not self.kernels.fused_rms
        self.copies_input = self.pieces and self.e < 4
        self.wide_U, self.per_token = self.tokens * (wide * self.batch * self.h), self.tokens * (wide * self.batch)

    def _attention_sizes(self, keys):
        """`core`: what dense attention keeps; `fused`: what the fused kernel does; `projected`: what the projection
        keeps that is not the kernel's."""
        c = self.config
        rotary = c.positions == "rotary"
        self.part = rotary and c.rotary_dim < c.head_dim  # then q and k are laid out anew, and the output like them
        # Carried keys are copied for the product, but for those of the last chunk: they are the whole tensor.
        copied = not self.carried or (keys != SEQUENCE and self.batch * c.kv_heads > 1)
        self.kept_K = self.all_K * copied
        self.core = self.U + 2 * self.kept_K + self.causal + self.S * (1 + self.dropout) + self.score_mask
        self.projected = self.U if self.part or not self.flash else Quadratic()
        turned = (self.U + self.K) * rotary
        # Keys and values that are carried are not counted again; queries that are not turned keep what they are cut of.
        qkv = self.U if self.carried and rotary else self.Q + turned * (not self.carried)
        self.fused = qkv + self.U + self.tokens * (4 * self.batch * c.heads)

    @property
    def block_kept(self):
        """What one block keeps: `memory.block_terms`, with the attention core that is here."""
        def dense(s):
            return sum(block_terms(self.config, self.batch, s, self.dtype, self.device).values())

        each = Quadratic.through(dense).b - self.e * self.batch * (2 * self.h + 2 * self.kv)  # a token, outside of it
        return self.tokens * each + (self.fused + self.projected if self.flash else self.core + self.U)

    @property
    def rotation(self):
        """cos and sin of each position in the type of the activations, where that is not theirs."""
        return self.tokens * (2 * self.e * self.config.rotary_dim * (self.e != 4 and self.config.positions == "rotary"))

    @property
    def around(self):
        """What is kept beside the blocks and the head, from the embeddings on."""
        positions = self.tokens * (8 * (self.config.positions == "learned"))
        return positions + self.rotation + self.token_mask + self.mask
