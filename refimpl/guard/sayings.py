"""What is said while a program trains: a sentence when something grows, fragments, or would not fit, one a minute.

    a cheap sign (what is there where steps end, peaks of phases)  →  three steps under the tracker  →  line and holder
"""

import time

from ..common.ledger import human
from ..explain.explanation import Explanation
from ..explain.script import Ending
from ..explain.script_run import Run
from .growth import Series
from .longest_batch import LongestBatch
from .traced_steps import STEPS, TracedSteps

EVERY = 60  # seconds between two sentences
NEAR, NEARLY = 0.75, 0.9  # of the capacity: worth a word; then steps run under the tracker, once
SMALL = 0.01  # share of what grows most: less is not said
FRAGMENTED = 1.5  # times as much reserved as allocated
LEAST = {"cpu": 2**20, "cuda": 2**12}  # bytes of a window of steps: what a process takes wavers


class Sayings:
    """Looks at each step, and has `tell(words)` called. `traced`: what steps under the tracker have shown, as
    `explain`'s JSON; `growth`: (bytes a step, since which step); `longest`: a LongestBatch."""

    def __init__(self, folder, loop, tell, note):
        self.traced = self.growth = self.tracing = None
        self.longest, self.every = LongestBatch(), EVERY
        self._folder, self._loop, self._tell, self._note = folder, loop, tell, note
        self._series, self._was_near, self._last, self._waiting = None, False, -float("inf"), {}

    def look(self, line, meter, batch):
        """Look at a step's line of the log: does something grow, fragment, or come near the end?"""
        peak, capacity, reserved = line["peak"], meter.capacity, line.get("reserved", 0)
        if batch and self.longest.add(batch, line["rest"]) and peak > NEAR * capacity:
            length = self.longest.would_not_fit(batch, capacity - peak + line["rest"])
            self.say("longest", f"step {line['step']} had the longest batch so far ({self.longest.longest:,}): "
                     f"{human(peak)} of {human(capacity)}" + (f"; at {length:,} it would not fit" if length else ""))
        if reserved > max(FRAGMENTED * peak, NEAR * capacity):
            self.say("fragmentation", f"reserved {reserved / peak:.1f} times allocated: fragmentation, see "
                     "PYTORCH_ALLOC_CONF=expandable_segments:True")
        if self.tracing is None:
            self._look_for_growth(line, meter, peak > NEARLY * capacity)
        self._say_waiting()

    def _look_for_growth(self, line, meter, is_near):
        if self._series is None or self._series.meter is not meter:
            self._series = Series(LEAST[meter.name], meter)
        found = self._series.add(line["step"], line["now"])
        self.growth = found or self.growth
        is_first, self._was_near = is_near and not self._was_near and not self.traced, self._was_near or is_near
        if (found or is_first) and self._loop.known.optimizers:
            tracing = TracedSteps(line["step"])
            if why := tracing.begin():
                self._note({"said": f"no step ran under the tracker: {why}"})
            else:
                self.tracing = tracing
                self._loop.watch_engine()
        elif found:
            self.say("growth", f"grows by {human(found[0])} a step since step {found[1]}")

    def stepped(self, optimizer, step):
        """Note the end of a step under the tracker, and behind the last one say what it has shown."""
        if self.tracing is None or optimizer is None or not self.tracing.stepped(optimizer):
            return
        tracing, self.tracing = self.tracing, None
        found = tracing.recorder.recording()
        run = Run(str(self._folder), found, Ending("steps"), STEPS, STEPS, {}, True, 0, None, True)
        self.traced = Explanation(run).as_dict() | {"of steps": f"{tracing.begun + 1} to {step}"}
        grows = self.traced["grows"] = [each for each in self.traced.get("grows") or () if each["bytes"] >= SMALL * max(
            every["bytes"] for every in self.traced["grows"])]
        self._note({"traced": self.traced["of steps"], "grows": grows, "top": self.traced.get("top")})
        if self.growth:
            rate, since = self.growth
            under = f"(steps {self.traced['of steps']} ran under the tracker)"
            for each in grows:
                lines = " and ".join(line.partition(": ")[0] for line in each["lines"])
                self.say(each["holder"], f"grows by {human(each['bytes'])} a step since step {since} {under}: made at "
                         f"{lines}, held by {each['holder']}")
            if not grows and self._series.meter.name == "cpu":
                self.growth = None  # what a process takes wavers: no tensor grows
            elif not grows:
                self.say("growth", f"grew by {human(rate)} a step from step {since} on, and these steps left nothing "
                         f"{under}: it grows more rarely")

    def say(self, kind, words):
        """Say a sentence, at most one a minute: of those that wait, the first of each kind."""
        self._waiting.setdefault(kind, words)
        self._say_waiting()

    def _say_waiting(self):
        now = time.monotonic()
        if self._waiting and now - self._last >= self.every:
            self._last = now
            self._tell(self._waiting.pop(next(iter(self._waiting))))
