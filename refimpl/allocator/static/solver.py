"""A search for plans where greedy is not enough: all blocks within a capacity that is close to the lower bound.

Blocks are placed from below, each as low as it can be, in order of their offsets. Every plan can be pushed down
into one of this kind, so it is enough to ask at each step which block comes next. A step is undone if

    bound       the blocks that a section of time still needs do not fit above the lowest place left for them:
                min over them of `lowest` + their bytes > capacity
    dominance   another block would fit whole below this one: it comes first

    sections    pieces of time between which something begins or ends; where no block that is left crosses from one to
                the next, the two sides are searched apart
    backjump    each failure names the steps that raised the blocks in question. Steps that are not among them are
                skipped on the way back: another choice there would fail in the same way
    restart     after so many steps (1,000 times 1, 1, 2, 1, 1, 2, 4 …), with the order of preference a little
                disturbed; of the candidates the lowest first, and every other time the preferred one

Canonical order, bounds by sections, dominance and decomposition: Moffitt, "MiniMalloc: A Lightweight Memory Allocator
for Hardware-Accelerated Machine Learning" (ASPLOS 2023). Backjumping: Prosser, "Hybrid Algorithms for the Constraint
Satisfaction Problem" (1993). Restarts: Luby, Sinclair, Zuckerman, "Optimal Speedup of Las Vegas Algorithms" (1993).

Here dominance is not counted among the reasons of a failure, so a search may pass over a
plan: it finds plans, and proves nothing if it finds none.
"""

import sys
import time

import numpy as np

from ...common.lifetimes import Lifetimes
from .static_plan import StaticPlan

FAR = 2**40  # the lowest place of what is placed
FIRST, UNIT, DISTURBED = 3000, 1000, 0.03  # steps before a restart; how far a preference moves, in shares of B


class OutOfSteps(Exception):
    """Raised inside a search that has used its steps."""


def solve(trace, capacity, *, steps=1_000_000, seconds=None, seed=0):
    """Return a StaticPlan of an AllocationTrace or Lifetimes within `capacity` bytes, or None if none was found.

    - `steps`: how many placements are tried in all; `seconds`: stop after so long on the processor, if that is earlier.

    The same arguments give the same plan, unless `seconds` ends the search. None is no proof that there is no plan.
    """
    lifetimes = Lifetimes.of(trace)
    there = np.flatnonzero((lifetimes.nbytes > 0) & (lifetimes.ends > lifetimes.begins))
    offsets, until = np.zeros(len(lifetimes), dtype=np.int64), time.process_time() + (seconds or FAR)
    if len(there):
        problem = PackingProblem(lifetimes.begins[there], lifetimes.ends[there], lifetimes.nbytes[there], capacity)
        if problem.sums.max() > problem.capacity:
            return None
        found = problem.search(steps, until, np.random.default_rng(seed))
        if found is None:
            return None
        offsets[there] = found
    return StaticPlan(lifetimes, offsets, lifetimes.nbytes)


class PackingProblem:
    """B blocks and S sections: `members` (S, B) says which block is live in which. All sizes in `unit` bytes."""

    def __init__(self, begins, ends, nbytes, capacity):
        self.unit = int(np.gcd.reduce(nbytes))  # small numbers: offsets are multiples of it anyway
        self.begins, self.ends, self.sizes = begins, ends, nbytes // self.unit
        self.capacity = capacity // self.unit
        self.members = _sections(begins, ends)
        self.firsts = self.members.argmax(axis=0)  # block b is live in sections firsts[b] … lasts[b] − 1
        self.lasts = len(self.members) - self.members[::-1].argmax(axis=0)
        self.meets = (begins[:, None] < ends) & (begins < ends[:, None])
        self.sums = self.members @ self.sizes

    def orders(self):
        """List orders of preference: by width, by the fullest section, by area (width × size), and by size."""
        width, area = self.ends - self.begins, (self.ends - self.begins) * self.sizes
        fullest = np.where(self.members, self.sums[:, None], 0).max(axis=0)
        keys = [(fullest, area, width), (width, area, fullest), (area, width, fullest), (area,),
                (width, self.sizes), (self.sizes, width)]  # the last is the first to count
        return [np.lexsort([-key for key in each]) for each in keys]

    def search(self, steps, until, dice):
        """Return offsets (B,) in bytes, or None."""
        orders, tried, before = self.orders(), 0, sys.getrecursionlimit()
        B = len(self.sizes)
        sys.setrecursionlimit(before + 4 * B)  # a step of the search is a level of recursion
        try:
            while steps > 0 and time.process_time() < until:
                turn, which = divmod(tried, 2 * len(orders))
                order = orders[which // 2]
                if turn:
                    order = order[np.argsort(np.arange(B) + dice.normal(0, DISTURBED * B, B))]
                limit = UNIT * _luby(turn) if turn else FIRST
                attempt = Attempt(self, order, min(steps, limit), lowest_first=not which % 2)
                tried += 1
                found = attempt.run()
                steps -= attempt.steps
                if found is not None:
                    offsets = np.zeros(B, dtype=np.int64)
                    offsets[order] = np.array(found) * self.unit
                    return offsets
            return None
        finally:
            sys.setrecursionlimit(before)


def _luby(i):
    """Return the i-th number of 1, 1, 2, 1, 1, 2, 4, 1, 1, 2, …"""
    length = i.bit_length()
    return 1 << length - 1 if i == (1 << length) - 1 else _luby(i - (1 << length - 1) + 1)


def _sections(begins, ends):
    """Return (S, B) booleans: who is live when. Of neighbours, one whose blocks are all in the other is left out."""
    times = np.unique(begins)
    members = (begins <= times[:, None]) & (times[:, None] < ends)
    inside = [any(not (members[i] & ~members[j]).any() for j in (i - 1, i + 1) if 0 <= j < len(times))
              for i in range(len(times))]
    return members[~np.array(inside)]


class Attempt:
    """One search, with blocks in an order of preference. Arrays have an entry more than blocks, for padding.

    Of a state: `lowest` (B + 1,), the lowest place of each block that is left, FAR for others; `raised` (B + 1,), the
    step that raised it there; `left` (S,), the sum of what is left in each section; `crossing` (S,), how many blocks
    that are left cross the beginning of a section.
    """

    def __init__(self, problem, order, limit, lowest_first=True):
        self.lowest_first = lowest_first
        B, sizes, members = len(order), problem.sizes[order], problem.members[:, order]
        self.limit, self.steps, self.capacity, self.offsets = limit, 0, problem.capacity, [0] * B
        self.sizes, self.highest = np.append(sizes, 0), np.append(problem.capacity - sizes, FAR)
        self.firsts, self.lasts = np.append(problem.firsts[order], 0), np.append(problem.lasts[order], 0)
        counts = members.sum(axis=1)
        self.members = np.full((len(members), counts.max()), B)  # numbers of the blocks in a section, padded with B
        for section, row in enumerate(members):
            self.members[section, :counts[section]] = np.flatnonzero(row)
        self.left = members @ sizes
        change = np.zeros(len(members) + 1, dtype=np.int64)
        np.add.at(change, self.firsts[:B] + 1, 1)
        np.add.at(change, self.lasts[:B], -1)
        self.crossing = np.cumsum(change)
        # Who meets block b comes to stand on it. Of the others, one that is preferred and could be as low as b would
        # have come first: it is higher by 1 at least.
        self.rises = np.zeros((B, B + 1), dtype=np.int64)
        numbers = np.arange(B)
        self.rises[:, :B] = np.where(problem.meets[order][:, order], sizes[:, None], numbers < numbers[:, None])

    def run(self):
        """Return offsets in the order of preference, or None."""
        lowest, S = np.zeros(len(self.sizes), dtype=np.int64), len(self.members)
        lowest[-1] = FAR
        try:
            failed = self._apart(lowest, np.zeros_like(lowest), self.left, self.crossing, (0, S), (0, S), 1)
        except OutOfSteps:
            return None
        return self.offsets if failed is None else None

    def _apart(self, lowest, raised, left, crossing, changed, span, step):
        """Search each side of the sections' boundaries that no block crosses, the smaller first. Returns what `_next`
        does. Only boundaries in `changed` are looked at."""
        cuts = np.flatnonzero(crossing[changed[0] + 1:changed[1]] == 0)
        if not len(cuts):
            return self._next(lowest, raised, left, crossing, span, step)
        ends, sides = [span[0], *(cuts + changed[0] + 1).tolist(), span[1]], []
        for first, last in zip(ends, ends[1:], strict=False):
            inside = (self.firsts >= first) & (self.lasts <= last) & (lowest < FAR)
            sides.append((int(inside.sum()), first, last, inside))
        for count, first, last, inside in sorted(sides, key=lambda side: side[:2]):
            if count:
                failed = self._next(np.where(inside, lowest, FAR), raised, left, crossing, (first, last), step)
                if failed is not None:
                    return failed
        return None

    def _next(self, lowest, raised, left, crossing, span, step):
        """Place the blocks that are left in the sections of `span`. Returns None if they are placed in `offsets`, or
        the steps that are the reason why they cannot be, as bits of an integer."""
        self.steps += 1
        if self.steps > self.limit:
            raise OutOfSteps
        if (reason := self._too_high(lowest, raised, left, span)) is not None:
            return reason
        dominated = int((lowest + self.sizes).min())  # who could not begin below the top of another
        if dominated >= FAR:
            return None
        candidates, reasons, bit = np.flatnonzero(lowest < dominated), 0, 1 << step
        if self.lowest_first:
            candidates = candidates[np.argsort(lowest[candidates], kind="stable")]
        for block in candidates.tolist():
            failed = self._place(block, lowest, raised, left, crossing, span, step)
            if failed is None:
                return None
            if not failed & bit:
                return failed  # whichever block comes next here
            reasons |= failed & ~bit | 1 << int(raised[block])
        return reasons

    def _place(self, block, lowest, raised, left, crossing, span, step):
        """Place a block as low as it can be, and then the rest. Returns what `_next` does."""
        offset, first, last = int(lowest[block]), int(self.firsts[block]), int(self.lasts[block])
        self.offsets[block] = offset
        above = np.maximum(lowest, self.rises[block] + offset)  # what is left comes later, so it is not below
        raised = np.where(above > lowest, step, raised)
        above[block] = FAR
        left, crossing = left.copy(), crossing.copy()
        left[first:last] -= self.sizes[block]
        crossing[first + 1:last] -= 1
        return self._apart(above, raised, left, crossing, (first, last), span, step + 1)

    def _too_high(self, lowest, raised, left, span):
        """Return the steps that raised blocks too high for the capacity, as bits, or None. Of several failures the one
        that goes back furthest."""
        over = (lowest > self.highest) & (lowest < FAR)
        if over.any():
            return 1 << int(raised[over.argmax()])
        members = self.members[span[0]:span[1]]
        floor = lowest[members].min(axis=1)
        full = np.flatnonzero((floor + left[span[0]:span[1]] > self.capacity) & (floor < FAR))
        if not len(full):
            return None
        found = []
        for section in full[:4].tolist():
            blocks, bits = members[section], 0
            for step in set(raised[blocks[lowest[blocks] < FAR]].tolist()):
                bits |= 1 << step
            found.append(bits)
        return min(found)
