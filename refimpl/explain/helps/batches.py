"""A batch in parts (`refimpl.accumulation`): activations of one part, and gradients that wait for the others.

The loop is another one then, which no switch can make of it: what is said is a bound.
"""

from bisect import bisect_right

from ...common.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES
from ...memory.storage_records import STEP
from ...memory.tracking.taking import WORKSPACE


def most_rows(timeline):
    """Return the rows of the largest batch that a model was given, 0 if none was."""
    return max((call.rows or 0 for call in timeline.recording.calls if call.depth == 1), default=0)


def whole(least, fewer):
    """Say why batches stay whole: `fewer` if no model was given a batch of `least` rows."""
    def why(timeline):
        calls = timeline.recording.calls
        rows = {call.rows for call in calls if call.depth == 1 and call.rows}
        if most_rows(timeline) < least:
            return fewer
        if any(call.sequence_first and call.rows in rows for call in calls):
            return "a module takes the sequence first (batch_first=False), so that the first dimension is no batch's"
        return timeline.recording.why_whole

    return why


def of_rows(timeline):
    """List the records that are shorter with fewer rows: made from the rows of a batch in a step, and gone by the end
    of the next. What the program keeps for longer, as an evaluation's predictions, stays."""
    ends = [end for _, end in timeline.steps] + [timeline.rows] * 2
    found = []
    for i in timeline.where(ACTIVATIONS, TEMPORARIES, WORKSPACE):
        at = bisect_right(ends, timeline.born[i])
        of_rows = i in timeline.recording.rows or timeline.categories[i] == WORKSPACE
        if of_rows and timeline.records[i].phase != STEP and (
                timeline.born[i] >= timeline.window.start) and timeline.freed[i] <= ends[min(at + 1, len(ends) - 1)]:
            found.append(i)
    return found


def waiting_gradients(timeline):
    """List their spans: a gradient is there from the first part on; when another part's is made, both for a moment."""
    return [(timeline.step_of(born)[0], born + 1, int(timeline.nbytes[i]))
            for i in timeline.where(GRADIENTS) for born in [int(timeline.born[i])]]
