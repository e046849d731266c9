"""Weights that are there twice while a checkpoint is loaded, in a start that takes more than the training after it."""

from ..phases import RESUME
from .answer import Answer

CURE = "make the model under `torch.device('meta')`, and `load_state_dict(…, assign=True)`: of the start's peak that"


def loading(timeline):
    """List an Answer, if the peak before the first forward is above that of all steps, and what was loaded is in it."""
    totals = timeline.totals[: timeline.window.start]
    highest = int(totals.max(initial=0))
    if highest <= timeline.peak:
        return []
    spans = [span for span in timeline.recording.saving if span.phase == RESUME]
    loaded = [i for i in timeline.alive(int(totals.argmax())).tolist()
              if any(span.begin < timeline.born[i] <= span.end for span in spans)]
    nbytes = sum(int(timeline.nbytes[i]) for i in loaded)
    lines = tuple(dict.fromkeys(timeline.records[i].line for i in loaded if timeline.records[i].line))[:1]
    if not lines:
        return []
    what = (f"{nbytes:,} bytes, loaded at {lines[0]}, are there beside the weights that they are copied into: the "
            f"start takes {highest:,} bytes, the steps {timeline.peak:,}")
    return [Answer("load", min(nbytes, highest - timeline.peak), what, lines, CURE)]
