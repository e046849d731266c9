"""Saves what ranks hold of a model in training, and loads it again, however many ranks there are and however it is cut.

`save(state, directory)` and `load(state, directory)`; `state_dict(state)`, `load_state_dict(state, sd)` and
`save_weights(state, path, dtype)`. The three that load return the step.
"""

from .state import TrainingState

__all__ = ["TrainingState"]
