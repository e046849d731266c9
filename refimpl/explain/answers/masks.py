"""Masks of tokens × tokens: what says which document a token belongs to has one number a token."""

from ..kinds import MASKS, Kinds
from .answer import Answer


def masks(timeline):
    """List an Answer, if masks are alive at the peak."""
    kinds = Kinds(timeline)
    gone = [i for i in range(len(timeline.records)) if timeline.nbytes[i] and kinds[i] == MASKS]
    there = [i for i in gone if timeline.born[i] <= timeline.peak_row < timeline.freed[i]]
    if not there:
        return []
    there.sort(key=lambda i: -timeline.nbytes[i])
    lines = tuple(dict.fromkeys(timeline.records[i].line for i in there if timeline.records[i].line))[:3]
    nbytes = sum(int(timeline.nbytes[i]) for i in there)
    what = (f"{nbytes:,} bytes are masks of tokens × tokens{f', made at {lines[0]}' if lines else ''}, as large as the "
            "square of the length")
    return [Answer("mask", timeline.saved([timeline.whole(i) for i in gone]), what, lines,
                   "`is_causal=True` where the mask is causal; for packed rows document ids (lengths, cu_seqlens) with a "
                   "kernel that takes them")]
