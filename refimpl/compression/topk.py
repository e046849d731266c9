"""Sends the k = ρn numbers that are largest in magnitude, and where they are: k · (4 + itemsize) bytes.

"Sparsified SGD with memory" (Stich et al. 2018); "Deep gradient compression" (Lin et al. 2018). Of all ways to send k
numbers this leaves the smallest residual. Finding them reads all n several times; `threshold` is cheaper.
"""

from . import sparse


class TopK:
    """The algorithm `"topk"` on flat tensors (n,). NaN counts as the largest of all."""

    summed = False  # each rank sends other places

    def __init__(self, ratio):
        self.ratio = ratio

    def payload_bytes(self, numel, itemsize):
        """Return the bytes that are sent of `numel` numbers."""
        return sparse.payload_bytes(numel, self.ratio, itemsize)

    def encode(self, x, dtype, seed):
        """Return what is sent of x (n,), as bytes."""
        return sparse.pack(x, x.abs().topk(sparse.count(x.numel(), self.ratio)).indices, dtype)

    def add(self, out, payload, dtype, seed):
        """Add what was sent to `out` (n,)."""
        sparse.add(out, payload, dtype)
