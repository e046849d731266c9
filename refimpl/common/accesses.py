"""The order in which things are needed, as buckets are: recorded in a step, expected in the next.

Nobody tells a store where a step begins. It finds that out: a shift s such that the last accesses are those of s
accesses ago, for as long a stretch as possible. Then the next s accesses are expected to be the last s again.

    P0 P1 P2 P1 P0 U0 U1 | P0 P1 P2        s = 7: the last three are those of seven ago; P1 comes next
"""

import bisect
from collections import defaultdict

LONGEST = 20_000  # accesses of a step


class AccessRecording:
    """Notes accesses to keys, and says when a key is needed next.

    `departures`: how often an access was another than expected, after a whole step had been repeated, in which every
    key came that was known. Expectations are then made anew. `last_departure`: (expected key, found key).
    """

    def __init__(self):
        self.order, self.times = [], []  # keys; seconds of computation before each
        self.departures, self.last_departure = 0, None
        self._stretches, self._at, self._keys = {}, defaultdict(list), set()  # shift → length; key → places in `order`
        self._shift, self.whole = 0, False  # whether a whole step has been repeated
        self.accesses = 0

    def note(self, key, seconds):
        """Note an access, `seconds` of computation after the one before."""
        if self.whole and self.expected() != key:
            if key in self._keys:  # or else the step was not yet whole
                self.departures, self.last_departure = self.departures + 1, (self.expected(), key)
            self.whole, self._stretches = False, {}
        now, self.accesses = len(self.order), self.accesses + 1
        self._stretches = {shift: length + 1 for shift, length in self._stretches.items()
                           if self.order[now - shift] == key}
        if not self.whole:
            for place in self._at[key]:  # each earlier access to the key may be a step ago
                self._stretches.setdefault(now - place, 1)
        self.order.append(key)
        self.times.append(seconds)
        self._at[key].append(now)
        self._keys.add(key)
        # the longest stretch; of equals the shortest step
        self._shift = max(self._stretches, key=lambda shift: (self._stretches[shift], -shift), default=0)
        self._settle()

    def _settle(self):
        """Look at one shift alone once a whole step has been repeated, and forget what lies far back."""
        shift = self._shift
        if shift and self._stretches[shift] >= shift and set(self.order[-shift:]) == self._keys:
            self.whole, self._stretches = True, {shift: self._stretches[shift]}
        keep = 2 * shift if self.whole else LONGEST  # two steps: the last one, and that it repeats
        if len(self.order) > 2 * keep:
            self.order, self.times, at = self.order[-keep:], self.times[-keep:], defaultdict(list)
            for place, key in enumerate(self.order):
                at[key].append(place)
            self._at, self._stretches = at, {shift: length for shift, length in self._stretches.items()
                                             if shift < keep}

    def forget(self, key):
        """Expect a key no more: it will not be needed again."""
        self._keys.discard(key)

    @property
    def step(self):
        """Return the accesses of a step, the next one first; [] if nothing is known yet."""
        return self.order[-self._shift:] if self._shift else []

    def expected(self):
        """Return the key that comes next, or None if nothing is known."""
        return self.order[-self._shift] if self._shift else None

    def coming(self):
        """Yield (distance, key, seconds of computation until then) of the accesses of a step; 0 is the next one."""
        seconds, first = 0.0, len(self.order) - self._shift
        for distance in range(self._shift):
            seconds += self.times[first + distance]
            yield distance, self.order[first + distance], seconds

    def next_use(self, key, after=-1):
        """Return the distance of the first access to `key` that is farther than `after`; infinity if none is
        expected."""
        places, first = self._at.get(key, ()), len(self.order) - self._shift
        begin = bisect.bisect_left(places, first)
        if not self._shift or begin == len(places):
            return float("inf")
        turn, within = divmod(after + 1, self._shift)
        found = bisect.bisect_left(places, first + within)
        turn, found = (turn, found) if found < len(places) else (turn + 1, begin)
        return turn * self._shift + places[found] - first

    def last_use(self, key):
        """Return how many accesses ago `key` came; infinity if it is not known to."""
        return len(self.order) - self._at[key][-1] if self._at.get(key) else float("inf")
