"""Keys and values of a sequence that is fed in chunks, and the sums of their gradients over the chunks."""

import math
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ..common.cache_bytes import gqa_cache_bytes
from ..common.ledger import Ledger
from ..common.marks import mark
from ..common.step_bytes import backward_moments, step_states, training_step_bytes

if TYPE_CHECKING:
    from ..config import GPTConfig

CARRIED = "keys and values"  # their category in a Ledger, and that of their gradients


class Carried:
    """Holds K and V of every attention layer, (B, G, s, D) each, and in backward their gradients.

    Each tensor is allocated once, by the first chunk, in that chunk's dtype (which autocast may have chosen). K and V
    of each layer are separate tensors: autograd raises an error if a tensor that it saved is written to, and later
    layers write. Inside `chunk(first, last)` every attention of the model stores its new keys and values at
    [first, last), and attends causally to all of [0, last) with the model's own attention function.
    """

    def __init__(self, model, batch, length):
        self.layers = [block.attention for block in model.blocks]
        c = model.config
        self._shape, self.length = (batch, c.kv_heads, length, c.head_dim), length
        self._values = [[None, None] for _ in self.layers]  # K, V
        self.gradients = None
        self.aligned = set()  # ids of attention functions whose causal mask was found aligned bottom-right

    def values(self, where, new):
        """Return the whole tensor of K or V that `new` is a part of. `where`: (layer, 0 for K or 1 for V)."""
        layer, which = where
        if self._values[layer][which] is None:
            self._values[layer][which] = mark(new.new_empty(self._shape), CARRIED)
        return self._values[layer][which]

    def allocate_gradients(self):
        """Allocate the sums of gradients, as zeros."""
        self.gradients = [[mark(torch.zeros_like(value), CARRIED) for value in pair] for pair in self._values]

    @contextmanager
    def chunk(self, first, last, store):
        """Replace the model's attention functions by those of one chunk. `store`: write its keys and values."""
        mask = _Mask(first, last)
        before = [vars(layer).get("attention") for layer in self.layers]
        try:
            for number, layer in enumerate(self.layers):
                # Not setattr: where the attention is a registered submodule, setattr accepts only another module.
                vars(layer)["attention"] = _attend(self, number, layer.attention, first, last, store, mask)
            yield
        finally:
            for layer, function in zip(self.layers, before, strict=True):
                if function is None:
                    vars(layer).pop("attention", None)
                else:
                    vars(layer)["attention"] = function


def _attend(carried, number, attention, first, last, store, mask):
    """Return the attention function of one layer in one chunk."""
    # A compiled block would treat the contents of `carried` as constants. (sys.modules: importing dynamo is slow.)
    carry = torch.compiler.disable(_carry) if "torch._dynamo" in sys.modules else _carry

    def attend(q_BHTD, k_BGTD, v_BGTD, **options):
        place = slice(first, last)
        k_BGSD, v_BGSD = (carry(new, carried, (number, which), place, store)
                          for which, new in enumerate((k_BGTD, v_BGTD)))
        if chunk := getattr(attention, "chunk", None):  # a mask of blocks: the chunk's own rows of it
            return chunk(first, last, carried.length)(q_BHTD, k_BGSD, v_BGSD)
        if attention is F.scaled_dot_product_attention and first > 0:
            # Its is_causal is aligned top-left: the chunk's first query would see the first key only.
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
    """Raise ValueError unless `causal` is aligned bottom-right.

    With two queries and three keys, the last query must see the last key, and the first query must not.
    """
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
    """Makes a causal mask (T, S), aligned bottom-right, in the queries' dtype; made once for all layers of a chunk."""

    def __init__(self, first, last):
        self.first, self.last, self.made = first, last, None

    def like(self, q_BHTD):
        if self.made is None:
            mask_TS = torch.full((self.last - self.first, self.last), -math.inf, dtype=q_BHTD.dtype,
                                 device=q_BHTD.device)
            self.made = mask_TS.triu_(self.first + 1)
        return self.made


class _Carry(torch.autograd.Function):
    """Maps a chunk's new keys (or values) to all keys so far.

    Backward adds the gradient of all keys so far to their sums. It returns the chunk's own part of the sums, which
    holds what later chunks added before.
    """

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
        if summed is None:  # truncated: keys and values of earlier chunks get no gradient
            return gradient[:, :, ctx.place].clone(), None, None, None, None
        summed = summed[layer][which]
        # Later chunks have added theirs: backward runs from the last chunk on.
        summed[:, :, : ctx.place.stop] += gradient
        return summed[:, :, ctx.place], None, None, None, None


def carried_bytes(config: "GPTConfig", batch_size: int, sequence: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes (int) of a whole sequence's keys and values: 2·e·L·B·s·G·D. Their gradients take as many.

    e bytes of a `dtype` number, L layers, B = `batch_size`, s = `sequence` tokens, G heads of keys, D their size.
    """
    return batch_size * sequence * gqa_cache_bytes(layers=config.layers, kv_heads=config.kv_heads,
                                                   head_dim=config.head_dim, dtype=dtype)


def chunked_step_bytes(config: "GPTConfig", batch_size: int, sequence: int, chunk_size: int,
                       dtype: torch.dtype = torch.float32, optimizer: str = "adamw", device: torch.device | str = "cpu",
                       gradient: str = "full") -> Ledger:
    """Predict the bytes of a training step with `ChunkedSequenceProcessor` at its peak: a Ledger.

    The peak is in the backward of one of the last two chunks. The last chunk attends to all keys. The chunk before it
    runs when all gradients are in memory. With the moments m of a chunk (`step_bytes.backward_moments`):

        states + inputs + 2 · carried_bytes + max over m and both chunks        (1 · carried_bytes if truncated)

    It is exact for the models of `training_step_moments`, and raises ValueError for the others.
    """
    if sequence <= chunk_size:
        return training_step_bytes(config, batch_size, sequence, dtype, optimizer, device)
    states, e = step_states(config, batch_size, sequence, dtype, optimizer), dtype.itemsize
    last, gradients, table = (sequence - 1) % chunk_size + 1, states["gradients"], e * config.vocab_size * config.hidden
    # In the embedding's backward: with a tied head, both gradients of the table and their sum come on top of `.grad`.
    highest = [Ledger(gradients=gradients, temporaries=3 * table * config.tied)]
    highest += backward_moments(config, batch_size, last, dtype, device, sequence, copied=False).values()
    copied = batch_size * config.kv_heads > 1
    for name, each in backward_moments(config, batch_size, chunk_size, dtype, device, sequence - last, copied).items():
        # The new gradient of the MLP's `down` exists beside the sum until it is added.
        down = e * config.hidden * (config.mlp_hidden + config.bias)
        if config.gated:  # freed before the gate's backward, which takes one such tensor more
            down = max(0, down - e * batch_size * chunk_size * config.mlp_hidden)
        highest.append(each + {"gradients": gradients - each["gradients"], "temporaries": down * (name == "MLP")})
    carried = carried_bytes(config, batch_size, sequence, dtype) * (2 if gradient == "full" else 1)
    return states - {"gradients": gradients} + {CARRIED: carried} + max(highest, key=lambda ledger: ledger.total)
