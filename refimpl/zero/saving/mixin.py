"""The methods by which every engine saves and loads its state: as a folder of shards, or as one dict on rank 0."""

import contextlib

import torch

from . import consolidated, sharded


class SavingMixin:
    """The part of `DataParallel` that saves and loads; later stages inherit it. All ranks call each method."""

    def save(self, directory):
        """Save the engine's state, for any stage on any number of ranks to load: see `sharded.save`."""
        with self._load_all_states():
            sharded.save(self, directory)

    def load(self, directory):
        """Load what an engine of any stage saved on any number of ranks: see `sharded.load`."""
        with self._load_all_states():
            sharded.load(self, directory)

    def state_dict(self):
        """Return the whole state on rank 0, in host memory, and {} on the others: see `consolidated.state_dict`."""
        with self._load_all_states():
            return consolidated.state_dict(self)

    def load_state_dict(self, sd):
        """Load what `state_dict` returned, at any stage and on any number of ranks; rank 0's `sd` counts."""
        with self._load_all_states():
            consolidated.load_state_dict(self, sd)

    def save_weights(self, path, dtype=torch.bfloat16):
        """Write the model alone to one safetensors file, on rank 0: see `consolidated.save_weights`."""
        with self._load_all_states():
            consolidated.save_weights(self, path, dtype)

    def _load_all_states(self):
        """Return a context in which all shards are on the device. Here they always are."""
        return contextlib.nullcontext()
