"""Masks of tokens × tokens: what says which document a token belongs to has one number a token."""

from ..kinds import MASKS
from .answer import about


def masks(timeline):
    """List an Answer, if masks are there at the peak."""
    kinds = timeline.kinds
    found = [i for i in range(len(timeline.records)) if timeline.nbytes[i] and kinds[i] == MASKS]
    return about(timeline, "mask", found, "{at}, are masks of tokens × tokens",
                 "`is_causal=True` where the mask is that; for packed rows the documents' lengths (cu_seqlens), with a "
                 "kernel that takes them; any other mask as lists of blocks (block_sparse_attention)")
