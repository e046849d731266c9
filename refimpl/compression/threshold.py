"""Sends numbers above a threshold, which a sample of them tells: k · (4 + itemsize) bytes, as `topk`.

    τ = the (1 − ρ) quantile of |x| in a sample of every (n // 4096)-th number
    S = the places with |x| ≥ τ; of more than k the k largest; of fewer, some of the rest are sent, too

So only the sample and the few above τ are sorted. "Deep gradient compression" (Lin et al. 2018), section 3.2 and
appendix B, on hierarchical sampling. The payload has always k numbers, so that ranks need not tell each other how many.
"""

import torch

from ..common.nested_tensors import is_dry
from . import sparse
from .topk import TopK

SAMPLE = 4096  # numbers


class Threshold(TopK):
    """The algorithm `"threshold"` on flat tensors (n,). NaN is above each threshold."""

    def encode(self, x, dtype, seed):
        """Return what is sent of x (n,), as bytes."""
        k, size = sparse.count(x.numel(), self.ratio), x.abs()
        if not k:
            return sparse.pack(x, torch.zeros(0, dtype=torch.int64, device=x.device), dtype)
        sample = size[:: max(1, x.numel() // SAMPLE)]
        threshold = sample.topk(sparse.count(sample.numel(), self.ratio)).values[-1]
        above = ~(size < threshold)  # not size >= threshold: NaN is above, too
        # a dry run has no numbers to find: as many as the threshold is to leave
        found = above.new_zeros(k, dtype=torch.int64) if is_dry(x) else above.nonzero().view(-1)
        if found.numel() > k:
            found = found[size[found].topk(k).indices]
        elif found.numel() < k:
            found = torch.cat([found, (~above).nonzero().view(-1)[: k - found.numel()]])
        return sparse.pack(x, found, dtype)
