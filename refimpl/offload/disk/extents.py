"""Parts of a file, one for each key; what is given back is merged with free parts beside it, and taken again."""

import bisect

from .file import aligned


class FileExtents:
    """Gives each key an extent, some whole blocks of the file. `end`: the bytes of the file that were ever taken.

    The smallest free part that fits is taken, or else the file grows, from a free part at its end if there is one.
    """

    def __init__(self):
        self.of, self._free, self.end = {}, [], 0  # key → (offset, bytes); (offset, bytes) by offset

    def allocate(self, key, nbytes, reserve=lambda end: None):
        """Return (offset, bytes) of `key`, the same as before if its size is. `reserve(end)` is called before the file
        grows; what it raises changes nothing."""
        nbytes, before = aligned(nbytes), self.of.get(key)
        if before is not None and before[1] == nbytes:
            return before
        if before is not None:  # what was there is about to be written anew
            self._give(*before)
        offset, end = self._find(nbytes)
        if end > self.end:
            try:
                reserve(end)
            except BaseException:
                if before is not None:
                    self._take(*before)
                raise
            if offset < self.end:
                self._take(offset, self.end - offset)
            self.end = end
        else:
            self._take(offset, nbytes)
        self.of[key] = offset, nbytes
        return self.of[key]

    def _find(self, nbytes):
        fits = [(free, offset) for offset, free in self._free if free >= nbytes]
        if fits:
            return min(fits)[1], self.end  # the smallest that fits: large free parts stay large
        if self._free and sum(self._free[-1]) == self.end:
            return self._free[-1][0], self._free[-1][0] + nbytes
        return self.end, self.end + nbytes

    def _give(self, offset, nbytes):
        if not nbytes:
            return
        at = bisect.bisect(self._free, (offset, nbytes))
        if at < len(self._free) and self._free[at][0] == offset + nbytes:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            at -= 1
            offset, before = self._free.pop(at)
            nbytes += before
        self._free.insert(at, (offset, nbytes))

    def _take(self, offset, nbytes):
        """Take a stretch of a free place."""
        if not nbytes:
            return
        at = bisect.bisect(self._free, (offset, float("inf"))) - 1
        begin, free = self._free.pop(at)
        rest = [(begin, offset - begin), (offset + nbytes, begin + free - offset - nbytes)]
        self._free[at:at] = [place for place in rest if place[1]]
