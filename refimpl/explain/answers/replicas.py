"""The whole model on each rank, as DistributedDataParallel has it: weights, gradients and states once for each."""

from ...common.ledger import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ..helps.row import RANKS
from .answer import about

WHOLE = ("DistributedDataParallel", "DataParallel")
CURE = "`Zero3(model, comm, optimizer)` of `refimpl.zero`, or `fully_shard` of torch, keeps a rank's part of them"
BOUND = f"on {RANKS} ranks, and a layer at a time is gathered"


def whole_models(timeline):
    """List an Answer, if a model runs inside of what gives each rank a whole copy."""
    if not any(model.name in WHOLE for model in timeline.recording.models):
        return []
    states = timeline.where(PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
    spans = [(first, after, nbytes + int(timeline.nbytes[i]) // RANKS) for i in states
             for first, after, nbytes in [timeline.whole(i)]]
    return about(timeline, "replica", timeline.where(PARAMETERS), "{at}, are all weights of a model, on each rank, "
                 "beside all their gradients and states", CURE, BOUND, spans)
