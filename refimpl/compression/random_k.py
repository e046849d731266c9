"""Sends k = ρn numbers at random places, which all ranks draw alike: k · itemsize bytes, and no index.

The n numbers are cut into k runs of n/k, and one is drawn of each, by a generator that every rank seeds alike, anew in
each step. So payloads of ranks have the same places and can be added on their way: an all_reduce of k numbers, on any
number of ranks. "Sparsified SGD with memory" (Stich et al. 2018), rand-k. What is sent is exact, not multiplied by n/k.
"""

import torch

from . import sparse


class RandomK:
    """The algorithm `"random"` on flat tensors (n,). If any of x is inf or NaN, all that is sent is NaN."""

    summed = True  # the sum of payloads is the payload of the sum

    def __init__(self, ratio):
        self.ratio = ratio

    def payload_bytes(self, numel, itemsize):
        """Return the bytes that are sent of `numel` numbers."""
        return sparse.count(numel, self.ratio) * itemsize

    def places(self, numel, seed, device):
        """Return the places (k,), int64."""
        k = sparse.count(numel, self.ratio)
        ends = torch.arange(k + 1) * numel // max(k, 1)
        # On the CPU: a GPU draws others from the same seed.
        drawn = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (ends[:-1] + (drawn * ends.diff()).long()).to(device)

    def encode(self, x, dtype, seed):
        """Return what is sent of x (n,): (k,) of `dtype`."""
        # 0 · Σ is NaN if any of x is inf or NaN, drawn or not.
        return (x[self.places(x.numel(), seed, x.device)] + 0 * x.sum()).to(dtype)

    def add(self, out, payload, dtype, seed):
        """Add what was sent to `out` (n,)."""
        out.index_add_(0, self.places(out.numel(), seed, out.device), payload.to(out.dtype))
