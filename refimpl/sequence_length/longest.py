"""The longest sequence for which a training step of any model fits in a budget, found by dry runs at a few lengths.

The size of a tensor is constant in the sequence length s (weights), or grows with s (activations, logits) or with s²
(scores). So the bytes alive after each operation of a step are a polynomial a·s² + b·s + c, and three dry runs
determine all of them.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
from tqdm import tqdm

from ..common.ledger import Ledger, human
from ..common.quadratic import Quadratic

ALIKE = 12  # dry runs with one and the same peak, the lengths doubling: a step that pads would have grown by then
FITTED = (4, 6, 8)  # the first three lengths, in multiples. Not 1: tensors of length 1 take special paths


@dataclass(frozen=True)
class LongestSequence:
    """Holds what `longest_sequence` found.

    - `sequence`: the length, in tokens. `limit`: what limits it, "budget" or "longest" (the argument).
    - `ledger`: the bytes of the step at its peak, from a dry run at this length; `peak`: their sum, an int.
    - `moment`: the operation at the peak, its module and phase.
    - `polynomial`: the bytes of that moment for any s, a Quadratic. It is fitted at three other lengths and equals
      `peak` at this one. None if no such polynomial was found, since the step runs other operations at each length.
    - `dry_runs`: {length: peak in bytes} of all dry runs, in the order in which they were made.
    """

    sequence: int
    budget: float
    limit: str
    moment: str
    polynomial: Quadratic | None
    ledger: Ledger = field(repr=False)
    dry_runs: dict = field(repr=False, hash=False)

    @property
    def peak(self) -> int:
        """Return the bytes at the highest moment of the step."""
        return self.ledger.total

    def __str__(self):
        of = f": {self.polynomial} bytes" if self.polynomial else ""
        limit = "the budget" if self.limit == "budget" else "the longest length allowed"
        return (f"{self.sequence:,} tokens: {human(self.peak)} of {human(int(self.budget))}, limited by {limit}\n"
                f"highest at {self.moment}{of}")


def longest_sequence(step: Callable[..., Any], budget: int, *args: Any, longest: int | None = None,
                     multiple: int = 64) -> LongestSequence:
    """Find the longest sequence for which `step(sequence, *args)` peaks within `budget` bytes: a LongestSequence.

        def step(sequence):
            model = TheirModel()                                # any torch model
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.zeros(8, sequence, dtype=torch.int64)
            for _ in range(2):                                  # AdamW makes its states in its first step
                model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

        found = longest_sequence(step, 16 * 2**30, longest=1024)
        found.sequence, found.peak; print(found)

    `step` runs only on fake tensors (`memory.dry_run`), so it takes no memory and computes nothing. All bytes that are
    alive during the step count: those of the model, the optimizer and the batch. `args`: models, optimizers and tensors
    that already exist; the step gets fake copies of them.

    1. Make dry runs at three lengths. If all run the same operations, fit a polynomial to the bytes after each
       operation m. The smallest root is the prediction:

           a_m·s² + b_m·s + c_m ≤ budget for all m:  s = min over m of ⌊(−b_m + √(b_m² − 4a_m(c_m − budget))) / 2a_m⌋

       If not, fit the peaks only. (A loop over chunks runs more operations for a longer sequence.)
    2. Make dry runs at the prediction, which must fit, and one multiple above it, which must not. Otherwise fit again
       with the new lengths, and search between the longest length known to fit and the shortest above it known not to.
       So the answer never rests on the fit alone.

    - `longest`: the upper limit of the search, such as the model's context length. None: there is no limit.
    - `multiple`: the answer is a multiple of it. For a step in chunks, give the chunk size.

    Raises TypeError for a step that is not callable. Raises ValueError for a budget that is not a positive number of
    bytes, or too small for `multiple` tokens (the message says how many bytes those take); for `longest` or `multiple`
    that is not a positive integer; for `longest` below `multiple`; for a step whose bytes do not grow with the
    sequence; and for whatever `memory.dry_run` refuses.
    """
    _check(step, budget, longest, multiple)
    end = math.inf if longest is None else longest // multiple * multiple + multiple  # the first that is too long
    with tqdm(desc="dry runs", delay=2) as progress:  # it stays: one that clears itself leaves an empty box
        search = _Search(step, args, budget, multiple, end, progress)
        search.run()
    if not search.fits:
        least = search.runs[multiple].peak.total
        raise ValueError(f"budget={budget:,} bytes: a step of {multiple} tokens takes {least:,} bytes, {human(least)}, "
                         "the smallest feasible budget. Give more, or take less: a smaller batch or model, fused "
                         "attention, recomputation")
    run = search.runs[search.fits]
    limit = "longest" if search.fails == end else "budget"
    return LongestSequence(search.fits, budget, limit, run.moment, search.polynomial(), run.peak,
                           {length: each.peak.total for length, each in search.runs.items()})


class _DryRun:
    """Makes a dry run of one length. Keeps its operations, the bytes after each, the peak's ledger and its place."""

    def __init__(self, step, length, args):
        from ..memory import dry_run

        try:
            trace = dry_run(step, length, *args)
        except Exception as error:
            error.add_note(f"raised in a dry run of {length:,} tokens by longest_sequence. If that is longer than the "
                           "model accepts, give longest=")
            raise
        timeline = trace.timeline
        highest = timeline.peak()
        self.operations, self.totals = [op.name for op in timeline.ops], timeline.totals
        self.peak, self.index = highest.ledger, highest.index
        self.moment = f"{highest.operation} in {highest.module or 'no module'}, {highest.phase}"


class _Search:
    """Narrows the interval from `fits`, the longest known to fit (0: none), to `fails`, the shortest known not to."""

    def __init__(self, step, args, budget, multiple, end, progress):
        self.step, self.args, self.budget, self.multiple, self.progress = step, args, budget, multiple, progress
        self.fits, self.fails, self.runs = 0, end, {}

    def run(self):
        """Make dry runs until no multiple lies between `fits` and `fails`."""
        room = int(min(self.fails / self.multiple - 1, FITTED[-1]))
        for times in FITTED if room == FITTED[-1] else sorted({max(1, room - 2), max(1, room - 1), room}):
            self.try_length(times * self.multiple)
        for turn in count():
            if self.fails - self.fits <= self.multiple:
                return
            length = self.middle() if turn % 3 == 2 else self.predicted()  # bisection, in case the fit is wrong
            self.try_length(max(self.fits + self.multiple, min(length, self.fails - self.multiple)))

    def try_length(self, length):
        """Make a dry run of `length` tokens and narrow the bounds."""
        self.runs[length] = run = _DryRun(self.step, length, self.args)
        self.progress.update()
        if run.peak.total > self.budget:
            self.fails = min(self.fails, length)
        elif length < self.fails:
            self.fits = max(self.fits, length)

    def nearest(self, lengths):
        """Return the three of `lengths` nearest to the bounds, ascending; None if there are fewer."""
        at = self.fits or self.fails
        if len(lengths) < 3:
            return None
        return sorted(sorted(lengths, key=lambda length: abs(length - at))[:3])

    def predicted(self):
        """Return the longest multiple that fits, by polynomials through the three nearest dry runs."""
        lengths = self.nearest(self.runs)
        if lengths is None:
            return self.fails - self.multiple
        runs = [self.runs[length] for length in lengths]
        if all(run.operations == runs[0].operations for run in runs):
            moments = np.unique([run.totals for run in runs], axis=1).T.tolist()
        else:
            moments = [[run.peak.total for run in runs]]
        fits = min(Quadratic.fit(dict(zip(lengths, each, strict=True))).largest(self.budget) for each in moments)
        return self.middle() if fits == math.inf else fits // self.multiple * self.multiple

    def middle(self):
        """Return the middle between the bounds, or twice the lower bound if no length is known to fail."""
        if self.fails < math.inf:
            return (self.fits + self.fails) // (2 * self.multiple) * self.multiple
        peaks = {run.peak.total for run in self.runs.values()}
        if len(peaks) == 1 and len(self.runs) == ALIKE:
            raise ValueError(f"step takes {peaks.pop():,} bytes at each of {', '.join(map(str, self.runs))} tokens: "
                             "does it use its argument? If it does, give longest=")
        return 2 * self.fits

    def polynomial(self):
        """Return the polynomial of the highest moment through the three lengths nearest to the answer, or None if it
        does not predict the answer's own peak. If the operations differ, it is that of the peaks."""
        answer, lengths = self.runs[self.fits], self.nearest([length for length in self.runs if length != self.fits])
        if lengths is None:
            return None
        runs = {length: self.runs[length] for length in lengths}
        same = all(run.operations == answer.operations for run in runs.values())
        found = Quadratic.fit({length: int(run.totals[answer.index]) if same else run.peak.total
                               for length, run in runs.items()})
        return found if found(self.fits) == answer.peak.total else None


def _check(step, budget, longest, multiple):
    if not callable(step):
        raise TypeError(f"step={step!r}: expected a function of the sequence length that builds the model and makes a "
                        "training step")
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget <= sys.float_info.max:
        raise ValueError(f"budget={budget!r}: expected bytes, a number above 0")
    for name, value in (("multiple", multiple), ("longest", multiple if longest is None else longest)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected an integer of at least 1")
    if longest is not None and longest < multiple:
        raise ValueError(f"multiple={multiple}: longer than longest={longest}; give a smaller one")
