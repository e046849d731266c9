"""Recall of 256 keys in place of 32, by what finds all of 32: is there room for them?

A state of 64 × 64 numbers holds 64 keys that are orthogonal. A cache holds whatever there is; of blocks that are picked
each has the same number of keys, so that eight times the keys are in eight times the blocks.
"""

from . import recall

SIZE, KINDS = recall.Size(pairs=256), ("dense", "native sparse", "linear", "gated delta rule")


def run(device="cpu", size=SIZE, kinds=KINDS, seeds=recall.SEEDS):
    """Return (settings, rows), those of the bench `recall`."""
    return recall.run(device, size, {name: recall.KINDS[name] for name in kinds}, seeds)
