"""A recorded run with some bytes taken away: what would the peak have been?

A technique changes when storages live, not what the program computes. So its saving is read from the recording: take
the bytes away from the rows of the timeline in which they would not be there, add those that the technique holds
itself, and look for the peak again. It may be somewhere else then, which a sum over the peak would miss.
"""

from functools import cached_property

import numpy as np

from ..memory.storage_records import BACKWARD, FORWARD
from ..memory.tracking.taking import WORKSPACE
from .kinds import Kinds


class RecordedTimeline:
    """The bytes of a ScriptRecording after each row of its timeline (row i + 1: after operation i), and who held them.

    Arrays by record: `born` and `freed` (rows; alive from the first up to before the second), `nbytes` (0 on another
    device than the trace's). `totals`: bytes by row. `window`: the rows from the first forward of a module on.
    """

    def __init__(self, recording):
        trace = recording.trace
        self.recording, self.trace, self.records = recording, trace, trace.records
        self.categories = trace.categories()
        self.rows = len(trace.ops) + 2
        self._read(trace)
        self.window = slice((trace.first_call or 0) + 1, self.rows)
        self.peak = int(self.totals[self.window].max())
        self.peak_row = int(self.totals[self.window].argmax()) + self.window.start

    def _read(self, trace):
        count, device = len(self.records), trace.device
        self.born = np.full(count, self.rows)
        self.freed, self.nbytes = np.full(count, self.rows), np.zeros(count, dtype=np.int64)
        for index, record, delta in trace.events:
            if self.records[record].device != device:  # bytes of another device are in no peak of this one
                continue
            if self.born[record] == self.rows:  # it may grow later: the first time counts
                self.born[record] = index + 1
            self.nbytes[record] += max(delta, 0)
            if delta < 0:
                self.freed[record] = index + 1
        self.totals = trace.timeline.totals

    def peak_with(self, spans):
        """Return the peak when `spans`, (first row, row after the last, ± bytes), are added to the timeline."""
        deltas = np.zeros(self.rows + 1, dtype=np.int64)
        for first, after, nbytes in spans:
            if first < after:
                deltas[first] += int(nbytes)
                deltas[min(after, self.rows)] -= int(nbytes)
        return int((self.totals + deltas.cumsum()[:-1])[self.window].max())

    def saved(self, spans):
        """Return by how many bytes `spans` lower the peak."""
        return self.peak - self.peak_with(spans)

    def workspaces(self, other_kernels):
        """Return the spans of workspaces that may be others with a technique, as if they were not there: of
        convolutions, whose kernels oneDNN chooses; and of all with `other_kernels`, where layouts or types change."""
        return [self.whole(i) for i in self.where(WORKSPACE) if other_kernels or "convolution" in self.records[i].op]

    @cached_property
    def kinds(self):
        """Return the Kinds of its records."""
        return Kinds(self)

    @property
    def last_peak(self):
        """Return the peak of the last step, when everything is as it goes on."""
        begin, end = self.steps[-1] if self.steps else (self.window.start, self.rows)
        return int(self.totals[begin:end].max())

    def whole(self, record):
        """Return the span of a record that would never be there."""
        return int(self.born[record]), int(self.freed[record]), -int(self.nbytes[record])

    def alive(self, row):
        """Return the records that are alive after a row, as an array of their numbers."""
        return np.flatnonzero((self.born <= row) & (row < self.freed) & (self.nbytes > 0))

    def where(self, *categories, phase=None):
        """Return the records of some categories (and a phase), that ever took bytes on this device."""
        return [i for i in np.flatnonzero(self.nbytes).tolist() if self.categories[i] in categories
                and (phase is None or self.records[i].phase == phase)]

    @cached_property
    def steps(self):
        """Return (first row, row after the last) of each step, from the first forward on."""
        ends = [end + 1 for end in self.recording.steps] or [self.rows]
        begins = [self.window.start, *ends[:-1]]
        return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]

    def outlives(self, i):
        """Tell whether a record is there when the step after the one that made it ends."""
        ends = self._ends
        made_in = int(np.searchsorted(ends, self.born[i]))
        return made_in + 1 < len(ends) and self.freed[i] > ends[made_in + 1]

    @cached_property
    def _ends(self):
        return [self.window.start, *(end for _, end in self.steps)]

    def step_of(self, row):
        """Return the step (first row, row after the last) that a row is in."""
        return next((step for step in self.steps if step[0] <= row < step[1]), (self.window.start, self.rows))

    @cached_property
    def backwards(self):
        """Return the rows of backward, in order."""
        return [i + 1 for i, op in enumerate(self.trace.ops) if op.phase == BACKWARD]

    @cached_property
    def forwards(self):
        """Return the rows of forward, in order."""
        return [i + 1 for i, op in enumerate(self.trace.ops) if op.phase == FORWARD]

    @cached_property
    def retained(self):
        """Tell whether a graph outlives its backward: when techniques would drop what it holds is not known then."""
        saved = [[self.records[i] for i in self.made_in(call) if self.records[i].saved]
                 for call in self.recording.calls if call.depth == 1 and call.goes_back]
        return any(records and not any(each.freed_by_backward for each in records) for records in saved)

    def begins_backward(self, record, call):
        """Return the first row of the backward of a call of which `record`, freed there, was kept.

        The row is looked for from where the record goes backwards, while operations belong to the call's module.
        """
        ops, row = self.trace.ops, int(self.freed[record]) - 1
        while row > call.end + 1 and ops[row - 2].phase == BACKWARD and inside(ops[row - 2].module, call.path):
            row -= 1
        return row

    def block_end(self, record):
        """Return the row after which no variable inside of a model can hold a record: the repeated block that made it
        has returned, or else the model has."""
        at = int(self.born[record]) - 1
        return next((call.end + 1 for call in self._outer_calls if call.begin <= at <= call.end), 0)

    @cached_property
    def _outer_calls(self):
        """The calls of repeated blocks, then those of models."""
        blocks = {path for model in self.recording.models for path in model.blocks}
        inner = [call for call in self.recording.calls if call.path in blocks]
        return inner + [call for call in self.recording.calls if call.depth == 1]

    def kept_by(self, call):
        """Return the records that were made in a call, survived it for backward, and are not what it returned."""
        return [i for i in self.made_in(call) if self.freed[i] > call.end + 1 and i not in call.outputs
                and self.records[i].freed_by_backward]

    def made_in(self, call):
        """Return the records that were made while a call ran, on this device."""
        first, after = np.searchsorted(self._births, (call.begin + 1, call.end + 1))
        return [i for i in self._order[first:after].tolist() if self.nbytes[i] and self.records[i].phase == FORWARD]

    @cached_property
    def _order(self):
        return np.argsort(self.born, kind="stable")

    @cached_property
    def _births(self):
        return self.born[self._order]


def inside(module, path):
    """Tell whether `module` is `path` or below it."""
    return module == path or module.startswith(f"{path}.")
