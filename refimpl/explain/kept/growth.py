"""What outlives its step, and what of that grows: each step leaves as many bytes again as the one before.

    grows(line) = min(alive now of those made in step k−1, alive now of those made in step k),  now: the end of step k

A line is one of the script, with the library's that it called and the operation; what is older than the recording has
its shape in place of one. One of which step k−2 left nothing, though it ran, does not grow: its variable is given anew.
Steps are those of one optimizer: of several that take turns, as in a GAN, each has rounds of its own.
"""

import gc
from collections import Counter, defaultdict
from typing import NamedTuple

from torch.utils.weak import WeakIdKeyDictionary

from ...common.ledger import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ...memory.storage_records import STEP
from .holders import Holder, Holders

NEEDED = 3  # ends of steps: before both steps that are compared, between them, after them
NAMED = 12  # lines whose holders are looked for, those with most bytes
SMALL = 0.01  # share of what one holder has: lines below it are not named


class Held(NamedTuple):
    """Bytes that one holder keeps. `lines`: where they were made, most first; `numbers`: of their records; the rest as
    in Holder."""

    nbytes: int
    lines: tuple
    numbers: tuple
    holder: str
    cure: str = ""
    is_full: bool = False

    def __str__(self):
        made = f"made at {_listed(self.lines)}, " if self.lines else ""
        return f"{made}held by {self.holder}"


class StepEnds:
    """How many records there were when each step of each optimizer ended."""

    def __init__(self):
        self._ends, self._last = WeakIdKeyDictionary(), ()

    def ended(self, optimizer, records):
        """Note that a step of `optimizer` ended, when there were so many records."""
        self._last = self._ends.setdefault(optimizer, [])
        self._last.append(records)

    def outlived(self, tracker):
        """Return (what grows, what is kept), lists of Held, those with most bytes first: of what is alive now, where
        the last step ends. None for what grows if there were fewer than three steps."""
        if len(self._last) < 2:
            return None, []
        collects = gc.isenabled()
        gc.disable()  # else what only cycles keep would go while it is looked at
        try:
            return self._outlived(tracker)
        finally:
            if collects:
                gc.enable()

    def _outlived(self, tracker):
        begin, middle, end = (0, *self._last)[-NEEDED:]
        alive = {number: key for key, number in tracker.alive().items()}
        ran, grew, kept = set(), defaultdict(_Line), defaultdict(_Line)
        for number, record in enumerate(tracker.records[:end]):
            line = record.line, record.source, record.op if record.born >= 0 else (record.op, record.shape)
            if number < begin:
                ran.add(line)
            if number in alive and _may_grow(record):
                grew[line].add(number, record.nbytes, alive[number],
                               0 if number < begin else 1 if number < middle else 2)
            if number in alive and number < middle and is_kept(record):
                kept[line].add(number, record.nbytes, alive[number], 1)
        grows = {line: min(each.nbytes[1:]) for line, each in grew.items() if each.nbytes[0] or line not in ran}
        most = [Counter({line: nbytes for line, nbytes in each.items() if nbytes})
                for each in (grows, {line: each.nbytes[1] for line, each in kept.items()})]
        keys = [{line: of[line].key for line, _ in some.most_common(NAMED)}
                for of, some in zip((grew, kept), most, strict=True)]
        holders = Holders([*keys[0].values(), *keys[1].values()])
        held = [_by_holder(some, {line: holders[key] for line, key in of.items()},
                           {line: tuple(made[line].numbers) for line in some})
                for some, of, made in zip(most, keys, (grew, kept), strict=True)]
        is_known = len(self._last) >= NEEDED
        return [each for each in held[0] if not each.is_full] if is_known else None, held[1]


class _Line:
    """Bytes of a line by generation, the numbers of its records, and the key of the largest one of generation 1."""

    def __init__(self):
        self.nbytes, self.numbers, self.key, self._largest = [0, 0, 0], [], None, 0

    def add(self, number, nbytes, key, generation):
        self.nbytes[generation] += nbytes
        self.numbers.append(number)
        if generation == 1 and nbytes > self._largest:
            self.key, self._largest = key, nbytes


def _may_grow(record):
    """Tell whether a storage is none of those of which each parameter has one: a state, or a gradient, may be made in
    whichever step needs it first."""
    return OPTIMIZER_STATE not in record.roles and not any(what for *_, what in record.owners)


def is_kept(record):
    """Tell whether a storage that outlives its step is the script's own: no weight, and nothing of an optimizer's."""
    return not (record.owners or record.held_by_optimizer or record.mark or record.phase == STEP or
                record.roles & {PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE})


def _by_holder(lines, holders, numbers):
    """Put the lines of each holder together: [Held]. Lines without one in `holders` are "others"; `numbers`: of the
    records of each line."""
    sums, where = Counter(), defaultdict(list)
    for line, nbytes in lines.most_common():
        holder = holders.get(line, Holder("others"))
        sums[holder] += nbytes
        where[holder].append((line, nbytes))
    return [Held(nbytes, tuple(dict.fromkeys(line or source for (line, source, _), some in where[holder]
                                             if (line or source) and some >= SMALL * nbytes)),
                 tuple(number for line, _ in where[holder] for number in numbers[line]), *holder)
            for holder, nbytes in sums.most_common()]


def _listed(lines):
    """Name lines: "train.py:35 and 37"."""
    words, file = [], None
    for line in lines:
        words.append(str(line.number) if line.file == file else str(line))
        file = line.file
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
