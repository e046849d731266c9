"""The temporaries of an optimizer that updates all its parameters at once: one by one, or fused, it needs none."""

import inspect

import torch

from ...common.ledger import TEMPORARIES
from ...memory.storage_records import STEP
from .answer import about

OF_ONE = {"Adam": 3, "AdamW": 3, "NAdam": 3, "RAdam": 3, "Adamax": 3}  # temporaries that one parameter's update holds
OF_OTHERS = 2


def foreach(timeline):
    """List two Answers: `fused=True`, where the optimizer has it, and `foreach=False`."""
    temporaries = [i for i in timeline.where(TEMPORARIES, phase=STEP) if timeline.records[i].op.startswith("_foreach_")]
    name = next((each.name for each in timeline.recording.optimizers if each.foreach), "the optimizer")
    what = f"{{at}}, are temporaries of {name}, which updates all parameters in one call (foreach)"
    found = []
    if "fused" in inspect.signature(getattr(torch.optim, name, foreach)).parameters:
        found += about(timeline, "fused", temporaries, what, f"`{name}(…, fused=True)`")
    return found + about(timeline, "foreach", temporaries, what, f"`{name}(…, foreach=False)`",
                         spans=_one_by_one(timeline, temporaries, OF_ONE.get(name, OF_OTHERS)))


def _one_by_one(timeline, temporaries, count):
    """Take temporaries away, and put in those of the largest parameter for as long as each update runs."""
    whole = [timeline.whole(i) for i in temporaries]
    largest = count * max((int(timeline.nbytes[i]) for i in temporaries), default=0)
    steps = [[span for span in whole if begin <= span[0] < end] for begin, end in timeline.steps]
    return whole + [(min(first for first, *_ in some), max(after for _, after, _ in some), largest)
                    for some in steps if some]
