"""Checks that a model that is cut computes what the whole does, on a small model of its class, once for each class.

`fp64` lets that toy compute in fp64, `comparison` says where two of them differ first, `cut_over_ranks` cuts it over
simulated ranks, `once_per_class` remembers what was found, and `loss_check` compares a loss from logits with the
model's own. `known_models/toys` makes the toy. `context/sequence_proof` checks a part of a sequence on each rank, and
`pipeline/stages_proof` checks the stages of a pipeline.
"""

from .comparison import CannotShrink, CutDiffers

__all__ = ["CannotShrink", "CutDiffers"]
