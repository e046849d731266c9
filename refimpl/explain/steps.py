"""When to stop: after k steps of every optimizer that still steps, by an exception from the last one's hook.

`torch.optim` calls a global hook after each step, whoever called `step()`: a loop, a Trainer, Accelerate, a GradScaler.
What a script does by hand in place of an optimizer is counted, too, where `hand_written` finds it.
The exception is no `Exception`, so that a loop which goes on after errors does not swallow it, while `finally` blocks
and contexts end as they would.
"""

import os
from collections import Counter

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from .hand_written import HandWritten

PATIENCE = 10  # how often a script may catch the end and go on
SILENT = 2  # steps beyond its own that one optimizer makes while another waits: that one was given up


class StepsDone(BaseException):
    """Ends a script after its k steps. Let it pass: a script that catches it is stopped all the same."""


class Steps:
    """Count optimizer steps, and end the script after `limit` of them: a context around the script.

    `done` tells whether every optimizer that stepped has `limit` steps, and `reached()` was true then. Not waited for
    are an optimizer that first steps later, one that the program let go of, and one that was given up: another has made
    `SILENT` steps more.
    `on_step(optimizer)` and `on_done()` are called when a step ended and when they all did; `on_caught()` when the
    script has caught the end `PATIENCE` times. Steps of processes that the script forks do not count.
    """

    def __init__(self, limit, on_step, on_done, on_caught, reached=lambda: True):
        self.limit, self.done, self.caught = limit, False, 0
        self._on_step, self._on_done, self._on_caught, self._reached = on_step, on_done, on_caught, reached
        self._steps, self._process = WeakIdKeyDictionary(), os.getpid()
        self.by_class = Counter()

    def __enter__(self):
        self._hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.stepped(optimizer))
        return self

    def __exit__(self, *exception):
        self._hook.remove()

    @property
    def count(self):
        """Return how many steps the slowest optimizer has made; per optimizer class the most are in `by_class`."""
        return min(self._steps.values(), default=0) if not self.done else self.limit

    def stepped(self, optimizer):
        """Count a step of an optimizer. StepsDone if it was the last one."""
        if os.getpid() != self._process:
            return
        if self.done:
            self.caught += 1
            if self.caught >= PATIENCE:
                self._on_caught()
            raise StepsDone
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        name = optimizer.name if isinstance(optimizer, HandWritten) else type(optimizer).__name__
        self.by_class[name] = max(self.by_class[name], steps)
        self._on_step(optimizer)
        if (min(self._steps.values()) >= self.limit or steps >= self.limit + SILENT) and self._reached():
            self._on_done()
            self.done = True  # not before: an error of ours is said
            raise StepsDone
