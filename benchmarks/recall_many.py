"""Recall of 128 keys in place of 32, by what finds all of 32: is there room for them?

A state of 64 × 64 numbers holds 64 keys that are orthogonal, half of these. A cache holds whatever there is. Of blocks
that are picked a question needs one, however many keys there are; but a block has four times as many.
"""

from . import recall

SIZE, KINDS = recall.Size(pairs=128), ("dense", "native sparse", "linear", "gated delta rule")


def run(device="cpu", size=SIZE, kinds=KINDS, seeds=recall.SEEDS):
    """Return (settings, rows), those of the bench `recall`."""
    return recall.run(device, size, {name: recall.KINDS[name] for name in kinds}, seeds)
