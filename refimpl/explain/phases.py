"""In which phase of a script each operation ran, and each phase's peak.

    start → (forward → backward → optimizer)*, with evaluation, generation, save and resume in between

A call of a model that trains, through which no backward goes, is evaluation, and generation inside of a method
`generate`. What runs between two such calls, or between two calls that save, is theirs: predictions are put together.
"""

import functools
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch

from ..memory.storage_records import BACKWARD, FORWARD, STEP

START, OPTIMIZER, BETWEEN = "start", "optimizer", "between"
EVALUATION, GENERATION, SAVE, RESUME = "evaluation", "generation", "save", "resume"
REACHED = (EVALUATION, GENERATION, SAVE)  # what a script may not do before it has made many steps
CALLS = ((SAVE, torch, "save"), (SAVE, torch.nn.Module, "state_dict"), (SAVE, torch.optim.Optimizer, "state_dict"),
         (SAVE, safetensors.torch, "save_file"), (RESUME, torch, "load"), (RESUME, torch.nn.Module, "load_state_dict"),
         (RESUME, torch.optim.Optimizer, "load_state_dict"), (RESUME, safetensors.torch, "load_file"))


class Span(NamedTuple):
    """The operations from `begin` to before `end`, of one phase."""

    phase: str
    begin: int
    end: int


class Saving:
    """Puts the context `around(phase)` around each call by which a script saves or loads, SAVE or RESUME."""

    def __init__(self, around):
        self._around, self._patches = around, ExitStack()

    def __enter__(self):
        for phase, owner, name in CALLS:
            original = getattr(owner, name)
            setattr(owner, name, self._noted(phase, original))
            self._patches.callback(setattr, owner, name, original)
        return self

    def __exit__(self, *exception):
        self._patches.close()

    def _noted(self, phase, original):
        @functools.wraps(original)
        def noted(*args, **kwargs):
            with self._around(phase):
                return original(*args, **kwargs)
        return noted


def phases_of(recording):
    """Return the phase of each operation of a ScriptRecording, as a list."""
    ops, spans = recording.trace.ops, list(recording.saving)
    training = [op.phase in (BACKWARD, STEP) for op in ops]
    called = [False] * len(ops)
    for call in recording.calls:
        if phase := own_phase(call):
            spans.append(Span(phase, call.begin, call.end))
        elif call.depth == 1:
            called[call.begin : call.end] = [True] * (call.end - call.begin)
    own = _own(spans, np.cumsum([False, *np.logical_or(training, called)]), len(ops))
    found, phase = [], START
    for i, op in enumerate(ops):
        if op.phase in (BACKWARD, STEP):
            phase = OPTIMIZER if op.phase == STEP else BACKWARD
        elif called[i]:
            phase = FORWARD
        elif own[i] in (EVALUATION, GENERATION):
            phase = own[i]  # what is made of its outputs follows
        elif phase in (BACKWARD, OPTIMIZER):
            phase = BETWEEN
        found.append(own[i] or phase)
    return found


def own_phase(call):
    """Return EVALUATION or GENERATION if a RecordedCall is that, else None."""
    if call.depth > 1 or call.goes_back or not call.trained:
        return None
    return GENERATION if call.generates else EVALUATION


def _own(spans, trained, count):
    """Return the phase that spans give to each operation, None if none does. Neighbours of one phase, between which
    nothing trained, are one span; `trained[i]`: how many operations before the i-th did. What is inside comes last."""
    own, last = [None] * count, {}
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        before = last.get(span.phase, span.begin)
        begin = before if trained[before] == trained[span.begin] else span.begin
        own[begin : span.end] = [span.phase] * (min(span.end, count) - begin)
        last[span.phase] = span.end
    return own


def peaks(timeline, phases):
    """Return {phase: bytes}, the peak of each phase, in the order of the script. `phases`: of each operation."""
    found = {}
    for i, phase in enumerate(phases):
        found[phase] = max(found.get(phase, 0), int(timeline.totals[i + 1]))
    for span in timeline.recording.saving:  # one that ran no operation took what was there
        found.setdefault(span.phase, int(timeline.totals[span.begin : span.begin + 2].min()))
    return found
