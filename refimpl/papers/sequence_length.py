"""A long sequence in chunks, in one screen: the gradient of all of it, with the activations of one chunk at a time.

Attention is causal: token t reads the keys and values of the tokens up to t, and nothing else of another position goes
into its output. So a sequence of s tokens can be fed in chunks 1 … n that carry K and V of each layer along:

    forward     chunk 1, 2 … n: each adds its keys and values to K and V. Its activations are freed.
    backward    chunk n … 2, 1: each runs again, now with a graph, and goes back through it.

A loss that is a sum over tokens is L = Σᵢ Lᵢ. Chunk i's own keys k_i are read by the chunks i, i+1 … n:

    ∂L/∂k_i = Σ_{j ≥ i} ∂L_j/∂k_i         complete when chunk i's turn comes, since all later ones have been
    bytes     activations(one chunk) + 2 · 2·e·layers·B·s·G·D        K and V, and their gradients; e bytes an element
    time      one more forward of each chunk

This is recomputation over time, as "Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016), section 5, does
for a recurrent network. "Transformer-XL" (Dai et al. 2019), section 3.2, carries states of chunks without a gradient.

Names of tensors end with their shape: B sequences, G heads of keys, T tokens of this chunk, S tokens so far (all s in
`values` and `gradients`), D features of a head. Without dropout: a chunk that runs again would draw other masks.
"""

import torch


class Carry(torch.autograd.Function):
    """Map a chunk's new keys (or values) to all of them so far; in backward, the gradient of all to that of the new."""

    @staticmethod
    def forward(ctx, new_BGTD, values_BGSD, gradients_BGSD, first, last):
        ctx.place, ctx.gradients = (first, last), gradients_BGSD
        if gradients_BGSD is None:  # the first time: in backward they are there already
            values_BGSD[:, :, first:last] = new_BGTD
        return values_BGSD[:, :, :last]

    @staticmethod
    def backward(ctx, gradient_BGSD):
        first, last = ctx.place
        ctx.gradients[:, :, :last] += gradient_BGSD  # of earlier chunks' keys, too: their turn comes
        return ctx.gradients[:, :, first:last], None, None, None, None  # Σ over j ≥ i


class Cache:
    """Hold K and V of each layer, (B, G, s, D), and in backward their gradients."""

    def __init__(self, length):
        self.length, self.values, self.gradients, self.chunk = length, {}, {}, (0, length)

    def carry(self, where, new_BGTD):
        """Return all keys so far for this chunk's `new_BGTD`. `where`: any name of a layer's K, or of its V."""
        if where not in self.values:
            B, G, _, D = new_BGTD.shape
            self.values[where] = new_BGTD.new_empty(B, G, self.length, D)
        return Carry.apply(new_BGTD, self.values[where], self.gradients.get(where), *self.chunk)


def forward_and_backward(loss_of_chunk, length, chunk_size):
    """Add the gradient of a whole sequence to `.grad`, chunk by chunk. Returns its loss, without a graph.

    `loss_of_chunk(first, last, cache)`: the sum of the losses of the tokens first … last − 1, computed from these
    tokens (at their positions!) by a model whose layers attend to `cache.carry("K of layer 3", k)` in place of k, and
    so for v. The causal mask is aligned bottom-right: the last query sees all keys.
    """
    chunks = [(first, min(first + chunk_size, length)) for first in range(0, length, chunk_size)]
    cache, loss = Cache(length), 0.0
    for cache.chunk in chunks:
        with torch.no_grad():
            loss = loss + loss_of_chunk(*cache.chunk, cache)
    cache.gradients = {where: torch.zeros_like(values) for where, values in cache.values.items()}
    for cache.chunk in reversed(chunks):
        loss_of_chunk(*cache.chunk, cache).backward()
    return loss
