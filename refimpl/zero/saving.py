"""What every engine does to be saved and to go on: to a folder of shards, or to one dict on rank 0."""

import contextlib

import torch

from . import checkpoint, consolidated


class Saving:
    """A part of `DataParallel`, which the stages after it inherit. All ranks call each of these."""

    def save(self, directory):
        """Write a checkpoint that any stage can load on any number of ranks: see `checkpoint`."""
        with self._all_here():
            checkpoint.save(self, directory)

    def load(self, directory):
        """Go on from a checkpoint that an engine of any stage saved on any number of ranks: see `checkpoint`."""
        with self._all_here():
            checkpoint.load(self, directory)

    def state_dict(self):
        """All of it on the host of rank 0, {} on the others: see `consolidated`."""
        with self._all_here():
            return consolidated.state_dict(self)

    def load_state_dict(self, sd):
        """Go on from what `state_dict` gave, of any stage and world; rank 0's `sd` counts."""
        with self._all_here():
            consolidated.load_state_dict(self, sd)

    def save_weights(self, path, dtype=torch.bfloat16):
        """The model alone, in one safetensors file, written by rank 0: see `consolidated`."""
        with self._all_here():
            consolidated.save_weights(self, path, dtype)

    def _all_here(self):
        """A context in which all states are where they can be read."""
        return contextlib.nullcontext()
