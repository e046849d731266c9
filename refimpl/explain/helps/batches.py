"""A batch in parts (`refimpl.accumulation`): activations of one part, and gradients that wait for the others."""

from ...common.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES
from ...memory.storage_records import STEP
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
    shapes = {shape for model in timeline.recording.models for shape in model.shapes}
    spans = []
    for i in timeline.where(ACTIVATIONS, TEMPORARIES):
        shape = timeline.records[i].shape
        if shape and shape not in shapes and timeline.records[i].phase != STEP and any(
                shape[0] and shape[0] % count == 0 for count in rows):
            first, after, nbytes = timeline.whole(i)
            spans.append((first, after, nbytes * (parts - 1) // parts))
    return Found(spans + [span for i in timeline.where(GRADIENTS) for span in _waiting(timeline, i)])


def _waiting(timeline, i):
    """A gradient is there from the first part on; when another part's is made, both are for a moment."""
    born, nbytes = int(timeline.born[i]), int(timeline.nbytes[i])
    begin, _ = timeline.step_of(born)
    return [(begin, born, nbytes), (born, born + 1, nbytes)]
