"""The temporaries of an optimizer that updates all its parameters at once: one by one, or fused, it needs none."""

import inspect

import torch

from ...memory.storage_records import STEP
from .answer import Answer

AT_ONCE = {"Adam": 3, "AdamW": 3, "NAdam": 3, "RAdam": 3, "Adamax": 3}  # temporaries that one parameter's update holds
OTHERS = 2


def foreach(timeline):
    """List two Answers: `foreach=False`, and `fused=True` where the optimizer has it."""
    update = [i for i in timeline.where("temporaries") if timeline.records[i].phase == STEP]
    temporaries = [i for i in update if timeline.records[i].op.startswith("_foreach_")]
    if not temporaries:
        return []
    name = next((each.name for each in timeline.recording.optimizers if each.foreach), "the optimizer")
    lines = tuple(dict.fromkeys(timeline.records[i].line for i in temporaries if timeline.records[i].line))[:2]
    at_peak = sum(int(timeline.nbytes[i]) for i in temporaries if timeline.born[i] <= timeline.peak_row
                  < timeline.freed[i])
    what = (f"{name} updates all parameters in one call (foreach), and holds {at_peak:,} bytes of temporaries for that"
            f"{f', at {lines[0]}' if lines else ''}")
    whole = [timeline.whole(i) for i in temporaries]
    largest = max(int(timeline.nbytes[i]) for i in temporaries) * AT_ONCE.get(name, OTHERS)
    of_one = [(min(first for first, *_ in some), max(after for _, after, _ in some), largest)
              for step in timeline.steps if (some := [span for span in whole if step[0] <= span[0] < step[1]])]
    found = [Answer("foreach", timeline.saved(whole + of_one), what, lines, f"`{name}(…, foreach=False)`")]
    if "fused" in inspect.signature(getattr(torch.optim, name, foreach)).parameters:
        found.append(Answer("fused", timeline.saved(whole), what, lines, f"`{name}(…, fused=True)`"))
    return found
