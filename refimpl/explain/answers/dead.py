"""What nothing reads any more and something still holds: `del` lets it go before the lines that need the room."""

import re
from collections import defaultdict

import numpy as np

from ...common.ledger import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ...memory.storage_records import BACKWARD, START
from ..kept.holders import CURES
from ..kept.names import CYCLE, UNSEEN
from .answer import Answer

OF_MODELS = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE)
DEL, UNUSED, COLLECTED = "del", "unused", "collect"
_TARGET = re.compile(r"\s*(?:for\s+([\w, .()]+?)\s+in\b|([\w, .]+?)\s*(?::[^=]+)?=(?!=))")


def dead(timeline):
    """List an Answer for each line of which storages are alive at the peak that nothing reads afterwards, and for each
    variable of which no step reads anything."""
    if not timeline.steps or any(record.op.startswith("empty_strided_c") for record in timeline.records):
        return []  # what the kernels of inductor read is not known
    over, grows = defaultdict(list), {i for held in timeline.recording.grows or () for i in held.numbers}
    for i in np.flatnonzero(timeline.nbytes).tolist():
        record = timeline.records[i]
        if record.op != START and record.line is not None and (name := _is_over(timeline, i)):
            if name != UNUSED or i not in grows:
                over[record.line, name, record.op, record.shape].append(i)
    lines, there = defaultdict(list), set(timeline.alive(timeline.peak_row).tolist())
    for (line, name, *_), numbers in over.items():
        if any(_after(timeline, i) <= timeline.peak_row for i in there.intersection(numbers)) and (
                name == UNUSED or any(timeline.freed[i] < timeline.rows for i in numbers)):
            lines[line, name].append(numbers)
    found = [_answer(timeline, line, name, sorts, there) for (line, name), sorts in lines.items()]
    return found + [_unread(timeline, held) for held in timeline.recording.kept if held.holder not in (CYCLE, UNSEEN)
                    and len(timeline.steps) > 1 and not any(each.holder == held.holder for each in
                                                            timeline.recording.grows or ())
                    and all(last_use(timeline, i) + 1 < timeline.steps[-1][0] for i in held.numbers)]


def last_use(timeline, i):
    """Return the operation that read or wrote a storage last."""
    return timeline.recording.uses.last.get(i, timeline.records[i].born)


def _after(timeline, i):
    """Return the row from which on nothing reads a storage."""
    return last_use(timeline, i) + 2


def _spans(timeline, numbers):
    """Return what letting go of storages changes, of each step's together: when nothing reads any of them."""
    steps = defaultdict(list)
    for i in numbers:
        steps[timeline.step_of(int(timeline.born[i]))].append(i)
    unread = {step: max(_after(timeline, i) for i in some) for step, some in steps.items()}
    return [(unread[step], int(timeline.freed[i]), -int(timeline.nbytes[i]))
            for step, some in steps.items() for i in some]


def _is_over(timeline, i):
    """Return the name of the Answer if nobody needs a storage after its last use, else None. What autograd saved, a
    kernel that is no operation may read until its backward."""
    at, record = last_use(timeline, i), timeline.records[i]
    if timeline.categories[i] in OF_MODELS:  # since the first step, not since the last: optimizers may take turns
        unused = at + 1 < timeline.steps[0][1] and len(timeline.steps) > 1 and timeline.freed[i] >= timeline.rows
        return UNUSED if unused else None
    if i in timeline.recording.uses.collected:
        return COLLECTED
    if timeline.freed[i] >= timeline.rows and timeline.born[i] < timeline.steps[-1][0]:
        return None  # a later step may read it
    if record.line != record.source and target(record.line) is None:
        return None  # a variable of a library
    if record.phase == BACKWARD or record.freed_by_backward:
        return None  # autograd's own
    return DEL if not record.saved or timeline.trace.ops[at].phase == BACKWARD else None


def target(line):
    """Return what a line of source gives a value to, None if to nothing: "loaded" of `loaded = torch.load(path)`."""
    found = _TARGET.match(line.text) if line else None
    return (found[1] or found[2]).strip() if found else None


def _answer(timeline, line, name, sorts, there):
    nbytes, variable = sum(int(timeline.nbytes[i]) for some in sorts for i in there.intersection(some)), target(line)
    what, change = {
        UNUSED: ("of models, gradients or optimizer state made at {} are there, and no later step here uses them",
                 "make each model and optimizer just before it is used, and drop it after"),
        COLLECTED: ("made at {} are in " + CYCLE, f"{CURES[CYCLE]}, which"),
        DEL: ("made at {} are still there at the peak, though nothing reads them any more",
              f"`del {variable}` after the last line that uses it" if variable else
              "let go of it after the last line that uses it")}[name]
    return Answer(name, timeline.saved([span for some in sorts for span in _spans(timeline, some)]),
                  f"{nbytes:,} bytes {what.format(line)}", (line,), change)


def _unread(timeline, held):
    return Answer("unread", timeline.saved(_spans(timeline, held.numbers)),
                  f"{held.nbytes:,} bytes {held}, are there, and the last step here reads none of it", held.lines,
                  f"let go of {held.holder} before the steps, if nothing reads it later")
