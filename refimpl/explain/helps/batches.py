"""A batch in parts (`refimpl.accumulation`): activations of one part, and gradients that wait for the others.

The loop is another one then, which no switch can make of it: what is said is a bound.
"""

from bisect import bisect_right

from ...common.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES
from ...memory.storage_records import STEP
from ...memory.tracking.taking import WORKSPACE
from .found import Found


def in_two(timeline):
    """Cut each batch in two."""
    return in_parts(timeline, 2)


def row_by_row(timeline):
    """Cut each batch into its rows."""
    rows = most_rows(timeline)
    return in_parts(timeline, rows) if rows > 2 else "the batch has two rows at most"


def most_rows(timeline):
    """Return the rows of the largest batch that a model was given, 0 if none was."""
    return max((call.rows or 0 for call in timeline.recording.calls if call.depth == 1), default=0)


def in_parts(timeline, parts):
    """Cut each batch into `parts` micro-batches."""
    rows = {call.rows for call in timeline.recording.calls if call.depth == 1 and call.rows}
    if not rows or max(rows) < parts:
        return "no model was given a batch of so many rows"
    if any(call.sequence_first and call.rows in rows for call in timeline.recording.calls):
        return "a module takes the sequence first (batch_first=False), so that the first dimension is no batch's"
    if timeline.recording.why_whole:
        return timeline.recording.why_whole
    whole = map(timeline.whole, cut(timeline))
    spans = [(first, after, nbytes * (parts - 1) // parts) for first, after, nbytes in whole]
    return Found(spans + [span for i in timeline.where(GRADIENTS) for span in _waiting(timeline, i)],
                 "of what rows made and a step lets go of; the loss has to be a mean over the rows")


def cut(timeline):
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


def _waiting(timeline, i):
    """A gradient is there from the first part on; when another part's is made, both are for a moment."""
    born, nbytes = int(timeline.born[i]), int(timeline.nbytes[i])
    begin, _ = timeline.step_of(born)
    return [(begin, born, nbytes), (born, born + 1, nbytes)]
