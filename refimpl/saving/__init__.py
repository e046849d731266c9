"""Saves what ranks hold of a model in training, and loads it again, however many ranks there are and however it is cut.

An engine describes what a rank holds as a `TrainingState`, a list of `refimpl.sharding.Shard`. Then

    save(state, directory)      load(state, directory)         each rank writes what it owns, reads what it has
    state_dict(state)           load_state_dict(state, sd)     the whole on rank 0
    save_weights(state, path)                                  the model alone, in one file
    check_shared(comm, folder)  exists(comm, folder)           before training: do all ranks see it, is a state there?

Those that load return the step. Read `training_state` and `sharded` first, then `consolidated`. Beneath: `durable`
writes files that survive a crash, `manifest` makes a folder of them one saved state, `description` says what has to be
the same where it is loaded, and `optimizer_state` which tensors a shard has. Hosts that share no folder keep their
parts by `own_disks`. What is read may be damaged: `load_checks` finds that before anything is changed. `schema` says
which form a manifest or a state_dict has, and `coverage` checks that each element is in one file.
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .consolidated import load_state_dict, save_weights, state_dict
    from .manifest import SavedStateError
    from .sharded import load, save
    from .shared_folder import check_shared, exists
    from .training_state import TrainingState

__getattr__, __dir__ = lazily(__name__, {
    ".consolidated": "load_state_dict save_weights state_dict", ".manifest": "SavedStateError",
    ".sharded": "load save", ".shared_folder": "check_shared exists", ".training_state": "TrainingState"})
__all__ = ["SavedStateError", "TrainingState", "check_shared", "exists", "load", "load_state_dict", "save",
           "save_weights", "state_dict"]
