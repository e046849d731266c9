"""A second copy of the weights and states that is made to be saved, in a script whose peak is there."""

from ...common.ledger import ACTIVATIONS, TEMPORARIES
from ..phases import SAVE, phases_of
from .answer import about

CURE = ("save the tensors themselves, which `torch.save` takes one at a time; on several ranks each its own shard, as "
        "`refimpl.saving` and torch.distributed.checkpoint do, and no whole state on one")


def copies(timeline):
    """List an Answer, if the peak is where the script saves, and copies of parameters or states are made there."""
    phases = phases_of(timeline.recording)
    if phases[timeline.peak_row - 1] != SAVE:
        return []
    shapes = set().union(*(model.shapes for model in timeline.recording.models))
    made = [i for i in timeline.where(ACTIVATIONS, TEMPORARIES) if timeline.records[i].shape in shapes
            and timeline.born[i] and phases[timeline.born[i] - 1] == SAVE]
    return about(timeline, "saved", made, "{at}, are copies of weights and states, made to be saved", CURE)
