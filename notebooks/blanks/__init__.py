"""What the pages have their readers build: the functions that are a technique, and what checks a reader's own.

There is one module for each page that has blanks. In it stands a function, whole, and the check of it, which returns
None if everything is right, else a sentence:

    def keep_inputs(function, x):
        ...

    @blank(keep_inputs, "parity and bytes", torch.Tensor)
    def check_keep_inputs(keep_inputs):
        ...

`tools/blanks.py` writes it into the page, with `...` in place of the body. The page then calls
`keep_inputs = build.check_keep_inputs(keep_inputs)`, which returns the reader's function if it is right, else ours.
"""

import inspect

from exercises import Exercise, tick
from exercises.asking import not_filled


class Blank(Exercise):
    """Checks a reader's function (or class) and returns the one that later cells use."""

    def __init__(self, ours, check, on, gives, process):
        super().__init__(check, on, gives, process)
        self.ours, self.key = ours, ours.__name__

    def __call__(self, answer):
        """Print what is wrong with `answer`, or that it is right. Return it if it is, else our own."""
        if not_filled(answer):
            print(f"{self.key}: not answered yet. The cells below use ours.")
            return self.ours
        if complaint := self.complaint(answer):
            print(f"{self.key}: {complaint}\nThe cells below use ours until yours is right.")
            return self.ours
        print(f"{self.key}: right, on {self.on}. The cells below use yours.")
        tick(self.slug, self.key)
        return answer

    def solution(self):
        """Print our own."""
        print(inspect.getsource(self.ours))


def blank(ours, on, gives=None, process="check"):
    """Decorate the check of a function that readers write. `ours`: our own; the rest is as `exercise` has it."""
    return lambda check: Blank(ours, check, on, gives, process)
