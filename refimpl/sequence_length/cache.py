"""Keys and values of a sequence that comes in chunks: kept in one place, and the place where their gradients meet."""

import math
import sys
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from .. import memory
from ..memory import Ledger
from ..memory.step_bytes import backward_moments, step_states

CARRIED = "keys and values"  # the category, of their gradients, too


class Carried:
    """K and V of every attention layer, (B, G, s, D) each, allocated once, in the type in which the first chunk brings
    them (autocast and rotations have their say); and as many gradients, in backward.

    Each is a tensor of its own: autograd notices a write to one that it keeps, and later layers write. Inside of
    `chunk(first, last)` every attention of the model stores its new keys and values at [first, last) and attends to all
    from 0 to last, causally, with the function that it was given.
    """

    def __init__(self, model, batch, length):
        self.layers = [block.attention for block in model.blocks]
        c = model.config
        self._shape = batch, c.kv_heads, length, c.head_dim
        self._values = [[None, None] for _ in self.layers]  # K, V
        self.gradients = None
        self.aligned = set()  # ids of attention functions that were seen to be

    def values(self, where, new):
        """Return the tensor of K or V, `where` = (layer, 0 or 1), that `new` is a part of."""
        layer, which = where
        if self._values[layer][which] is None:
            self._values[layer][which] = memory.mark(new.new_empty(self._shape), CARRIED)
        return self._values[layer][which]

    def need_gradients(self):
        """Allocate the sums of gradients, zeros."""
        self.gradients = [[memory.mark(torch.zeros_like(value), CARRIED) for value in pair] for pair in self._values]

    @contextmanager
    def chunk(self, first, last, store):
        """Make the attentions of the model those of a chunk. `store`: its keys and values are new."""
        mask = _Mask(first, last)
        before = [vars(layer).get("attention") for layer in self.layers]
        try:
            for number, layer in enumerate(self.layers):
                # Not setattr: an attention that is a module is registered, and would have to be replaced by another.
                vars(layer)["attention"] = _attend(self, number, layer.attention, first, last, store, mask)
            yield
        finally:
            for layer, function in zip(self.layers, before, strict=True):
                if function is None:
                    vars(layer).pop("attention", None)
                else:
                    vars(layer)["attention"] = function


def _attend(carried, number, attention, first, last, store, mask):
    """The attention of one layer in one chunk."""
    # A compiled block would take for a constant what comes to `carried` later. (Asked so: to import it is slow.)
    carry = torch.compiler.disable(_carry) if "torch._dynamo" in sys.modules else _carry

    def attend(q_BHTD, k_BGTD, v_BGTD, **options):
        place = slice(first, last)
        k_BGSD, v_BGSD = (carry(new, carried, (number, which), place, store)
                          for which, new in enumerate((k_BGTD, v_BGTD)))
        if attention is F.scaled_dot_product_attention and first > 0:
            # Its own causal mask is aligned top-left: the first query would see the first key only.
            options = {**options, "is_causal": False, "attn_mask": mask.like(q_BHTD)}
        elif first > 0 and id(attention) not in carried.aligned:
            _check_alignment(attention, q_BHTD, k_BGSD, options)
            carried.aligned.add(id(attention))
        return attention(q_BHTD, k_BGSD, v_BGSD, **options)

    return attend


def _carry(*args):
    return _Carry.apply(*args)


@torch.no_grad()
def _check_alignment(attention, q_BHTD, k_BGSD, options):
    """ValueError unless of two queries and three keys the last query sees the last key, and the first does not."""
    if isinstance(q_BHTD, FakeTensor):
        return
    q, k, v = (like.new_zeros(1, like.shape[1], n, like.shape[3]) for like, n in ((q_BHTD, 2), *[(k_BGSD, 3)] * 2))
    v[:, :, 2] = 1
    first, last = attention(q, k, v, **options | {"dropout_p": 0.0} if "dropout_p" in options else options)[0, 0, :, 0]
    if first != 0 or last == 0:
        raise ValueError(f"attention {attention}: with causal, 2 queries and 3 keys, the last query must see all keys "
                         "and the first query the first two (aligned bottom-right, as in softmax_attention). torch's "
                         "is_causal is aligned top-left: give scaled_dot_product_attention itself to the model")


class _Mask:
    """Causal and aligned bottom-right, (T, S), in the queries' type: made once, for all layers of a chunk."""

    def __init__(self, first, last):
        self.first, self.last, self.made = first, last, None

    def like(self, q_BHTD):
        if self.made is None:
            mask_TS = torch.full((self.last - self.first, self.last), -math.inf, dtype=q_BHTD.dtype,
                                 device=q_BHTD.device)
            self.made = mask_TS.triu_(self.first + 1)
        return self.made


class _Carry(torch.autograd.Function):
    """New keys (or values) of a chunk → all keys so far. Backward: what earlier chunks' keys get is added to what they
    have; the chunk's own get that, and what later chunks added before."""

    @staticmethod
    def forward(ctx, new, carried, where, place, store):
        ctx.carried, ctx.where, ctx.place = carried, where, place
        values = carried.values(where, new)
        if store:
            values[:, :, place] = new
        return values[:, :, : place.stop]

    @staticmethod
    def backward(ctx, gradient):
        summed, (layer, which) = ctx.carried.gradients, ctx.where
        if summed is None:  # truncated: earlier chunks get nothing
            return gradient[:, :, ctx.place].clone(), None, None, None, None
        summed = summed[layer][which]
        summed[:, :, : ctx.place.stop] += gradient
        return summed[:, :, ctx.place], None, None, None, None


def carried_bytes(config, batch_size, sequence, dtype=torch.float32):
    """Count the bytes of a whole sequence's keys and values: 2·e·L·B·s·G·D. Their gradients take as many."""
    return 2 * dtype.itemsize * config.layers * batch_size * sequence * config.kv_heads * config.head_dim


def chunked_step_bytes(config, batch_size, sequence, chunk_size, dtype=torch.float32, optimizer="adamw", device="cpu",
                       gradient="full"):
    """Count the bytes of a training step through `ChunkedSequenceProcessor` at its peak: a Ledger.

    The two last chunks are the highest: the last attends to all keys, and when the one before it runs again all
    gradients are there. So with the moments m of a chunk (`memory.step_bytes.backward_moments`):

        states + inputs + 2 · carried_bytes + max over m and both chunks        (once carried_bytes if truncated)

    As exact as `memory.training_step_moments`, and for the same models. ValueError as there.
    """
    if sequence <= chunk_size:
        return memory.training_step_bytes(config, batch_size, sequence, dtype, optimizer, device)
    states, e = step_states(config, batch_size, sequence, dtype, optimizer), dtype.itemsize
    last, gradients, table = (sequence - 1) % chunk_size + 1, states["gradients"], e * config.vocab_size * config.hidden
    highest = [Ledger(gradients=gradients, temporaries=3 * table * config.tied)]  # of the embedding: three become one
    highest += backward_moments(config, batch_size, last, dtype, device, sequence, copied=False).values()
    copied = batch_size * config.kv_heads > 1
    for name, each in backward_moments(config, batch_size, chunk_size, dtype, device, sequence - last, copied).items():
        # The new gradient of `down` is beside the sum for a moment.
        down = e * config.hidden * (config.mlp_hidden + config.bias)
        if config.activation == "swiglu":  # it is gone when the gate is highest
            down = max(0, down - e * batch_size * chunk_size * config.mlp_hidden)
        highest.append(each + {"gradients": gradients - each["gradients"], "temporaries": down * (name == "MLP")})
    carried = carried_bytes(config, batch_size, sequence, dtype) * (2 if gradient == "full" else 1)
    return states - {"gradients": gradients} + {CARRIED: carried} + max(highest, key=lambda ledger: ledger.total)
