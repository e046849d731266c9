"""A row of EFFECTS: what a technique does to which storages, when, and how sure that is."""

from typing import NamedTuple

import numpy as np

from .found import LOOSE, NEARLY, Found

RANKS = 8


def part(n):
    """Leave 1/n of each storage; n may be a function of the timeline."""
    return lambda timeline, records: timeline.nbytes[records] // (n(timeline) if callable(n) else n)


def always(timeline, records):
    """From birth until freed."""
    return [(i, *timeline.whole(i)[:2]) for i in records]


class Effect(NamedTuple):
    """Some storages are away in some rows; what is left of them is there until they are freed.

    `what`: categories and kinds, or one function of the timeline that lists records. `to(timeline, records)` lists the
    bytes that are left of each, `when(timeline, records)` (record, first row, row after the last).
    """

    what: tuple
    to: object
    when: object = always

    def left(self, timeline, kinds):
        """Return {storage: bytes that are left}, of those that get smaller."""
        records = self.what[0](timeline) if callable(self.what[0]) else [
            i for i in np.flatnonzero(timeline.nbytes).tolist()
            if timeline.categories[i] in self.what or kinds[i] in self.what]
        return {i: int(n) for i, n in zip(records, self.to(timeline, records), strict=True) if n < timeline.nbytes[i]}

    def spans(self, timeline, left):
        """List (first row, row after the last, ± bytes). Once a storage is back, both are there."""
        rows = self.when(timeline, left)
        away = [(first, after, left[i] - int(timeline.nbytes[i])) for i, first, after in rows]
        return away + [(after, int(timeline.freed[i]), left[i]) for i, _, after in rows
                       if left[i] and after < timeline.freed[i]]


def cut(*what, to=None, **when):
    """Leave some of the bytes of storages, a rank's part if nothing else is said."""
    return Effect(what, to or part(RANKS), **when)


def dropped(*what, **when):
    """Leave nothing of storages."""
    return Effect(what, lambda timeline, records: [0] * len(records), **when)


packed, moved = cut, dropped  # in fewer bytes; to the host: nothing is left on the device


class Row(NamedTuple):
    """What one technique does: its `effects`, of which the last decides where two name a storage, and what it `puts` in
    place, functions of the timeline that list (first row, row after the last, ± bytes). Where the first effect finds
    nothing, or `unless` is a reason, it saves nothing.

    It is exact without a `bound`: why the bytes are one. With the effects `least`, or `most`, behind the others it
    saves least, or most; where these are apart, `apart` is the bound. A bound is `loose` if it has to count all that
    can be cut, or they are far apart. What is said, as `bound`, may be a function of the timeline.
    """

    effects: list
    puts: tuple = ()
    bound: object = ""
    loose: object = True
    nothing: object = ""
    unless: object = ""
    least: tuple = ()
    most: tuple = ()
    apart: str = ""

    def __call__(self, timeline):
        """Return a Found, or why nothing is saved."""
        unless, nothing, bound, loose = (said(timeline) if callable(said) else said
                                         for said in (self.unless, self.nothing, self.bound, self.loose))
        likely = most = [] if unless else self._spans(timeline)
        if not likely:
            return unless or nothing or f"there is nothing of {' or '.join(self.effects[0].what)}"
        if self.most:
            least, most = self._spans(timeline, self.least), self._spans(timeline, self.most)
            surely, saves, at_most = map(timeline.saved, (least, likely, most))
            loose = bool(loose) or LOOSE * surely < at_most
            near = surely >= NEARLY * saves and saves >= NEARLY * at_most
            bound = bound or ("" if near else self.apart)
        return Found(most, bound, loose) if bound else Found(likely)

    def _spans(self, timeline, more=()):
        kinds, spans, decided, left = timeline.kinds, [], set(), {}
        for effect in reversed([*self.effects, *more]):
            left = effect.left(timeline, kinds)
            spans += effect.spans(timeline, {i: n for i, n in left.items() if i not in decided})
            decided |= left.keys()
        found = left or not self.effects  # of the first effect
        return spans + [span for put in self.puts for span in put(timeline)] if found else []
