"""Which bucket is evicted when memory is short: Belady's rule, which knows the future, and LRU, which knows the past.
Both are replayed on a trace, to count the bytes that each would have moved.

A trace is what an engine asks of a store: [(what, key, bytes)], where `what` is

    "need"       the bucket must be on the device from now on
    "changed"    it is not computed with any more, and differs from what was loaded
    "same"       it is not computed with any more, and does not
    "drop"       its contents are not needed again

Belady's rule evicts what is needed furthest in the future ("A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 1966). No rule loads less often, where all have the same size. What is being computed
with cannot go.
"""

from collections import defaultdict, deque

RULES = ("belady", "lru")


def moved_bytes(trace, capacity, rule="belady", steps=1, first=None):
    """Replay a trace with a device of `capacity` bytes; return {"loaded": bytes, "evicted": bytes}.

    `steps`: the trace is repeated so often, and all repetitions from `first` on count (None: the last). ValueError for
    another rule, or a capacity that does not hold what is computed with at a time.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: expected one of {', '.join(RULES)}")
    whole, state = list(trace) * steps, _SimulatedDevice(capacity, rule)
    future = defaultdict(deque)
    for place, (what, key, _) in enumerate(whole):
        if what == "need":
            future[key].append(place)
    for place, (what, key, nbytes) in enumerate(whole):
        if place == len(trace) * (steps - 1 if first is None else first):
            state.loaded = state.evicted = 0
        if what == "need":
            future[key].popleft()
        state.next = {each: places[0] if places else float("inf") for each, places in future.items()}
        state.event(place, what, key, nbytes)
    return {"loaded": state.loaded, "evicted": state.evicted}


class _SimulatedDevice:
    def __init__(self, capacity, rule):
        self.capacity, self.rule, self.next = capacity, rule, {}
        self.here, self.used, self.dirty, self.in_use, self.away = {}, {}, set(), set(), set()
        self.loaded = self.evicted = 0

    def event(self, place, what, key, nbytes):
        self.used[key] = place
        if what == "drop":
            for known in (self.dirty, self.in_use, self.away):
                known.discard(key)
            self.here.pop(key, None)
            return
        if key not in self.here:
            if key in self.away:
                self.loaded += nbytes
                self.away.discard(key)
            self.here[key] = nbytes
        if what == "need":
            self.in_use.add(key)
            self.make_room()
            return
        self.in_use.discard(key)
        if what == "changed":
            self.dirty.add(key)
        self.make_room()

    def make_room(self):
        while sum(self.here.values()) > self.capacity:
            free = [key for key in self.here if key not in self.in_use]  # what is computed with cannot go
            if not free:
                raise ValueError(f"capacity={self.capacity:,}: {sum(map(self.here.get, self.in_use)):,} bytes are "
                                 "computed with at a time; pass at least that")
            if self.rule == "belady":
                victim = max(free, key=lambda key: self.next.get(key, float("inf")))
            else:
                victim = min(free, key=self.used.get)
            if victim in self.dirty:  # what was not changed is still where it came from
                self.evicted += self.here[victim]
                self.dirty.discard(victim)
            self.away.add(victim)
            del self.here[victim]
