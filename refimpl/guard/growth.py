"""Whether each step leaves more than the one before, by what is there where steps end.

    grows: of three neighbouring windows of W steps, each has no less in any step than the one before in all of its own,
    and its least is more

That is hardly chance: nine numbers in any order are so once in 1,680 times. What it finds, a tracker looks at.
"""

from collections import deque

WINDOWS = 3
SIZES = 3, 12, 48, 192  # steps of a window: what grows rarely shows in a long one
FIRST = 2  # steps that make what stays: states of the optimizer, gradients
SHARE = 0.0005  # of what is there: what grows by less from window to window is not looked for


class Series:
    """Bytes where steps end, as `meter` reads them. `least`: bytes by which a window has to be more than the one
    before."""

    def __init__(self, least, meter=None):
        self.meter = meter
        self._values, self._count, self._least = deque(maxlen=WINDOWS * SIZES[-1]), 0, least
        self.least_size = SIZES[0]  # of a window: smaller ones have been looked at, and nothing was found

    def add(self, step, nbytes):
        """Note a step. Return (bytes a step, the step since which it grows) if it does, else None."""
        self._count += 1
        if self._count <= FIRST:
            return None
        self._values.append((step, nbytes))
        for size in SIZES:
            if size >= self.least_size and (self._count - FIRST) % size == 0:
                if found := self._grows(size):
                    self.least_size = SIZES[SIZES.index(size) + 1] if size != SIZES[-1] else size
                    return found
        return None

    def _grows(self, size):
        """Compare the last windows; go back for the first that is more than the one before."""
        values = list(self._values)
        windows = [values[max(0, end - size) : end] for end in range(len(values), 0, -size)]  # the last one first
        rises = 0
        for later, earlier in zip(windows, windows[1:], strict=False):
            now, before = ([nbytes for _, nbytes in each] for each in (later, earlier))
            if min(now) < max(before) or min(now) - min(before) < max(self._least, SHARE * now[0]):
                break
            rises += 1
        if rises < WINDOWS - 1:
            return None
        first, last = windows[rises], windows[0]
        return round((last[-1][1] - first[0][1]) / (last[-1][0] - first[0][0])), first[0][0]
