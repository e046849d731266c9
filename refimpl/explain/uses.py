"""Which operation read each storage last, which storages were masks of attention, and which only cycles held."""

import gc

import torch

ATTENTION = "_scaled_dot_product"  # how the names of attention's operations begin
MASKS = ("attn_mask", "attn_bias")


class Uses:
    """Hears of each operation of a tracker: `last` is {number of a record: the operation that read or wrote it last},
    `masks` the numbers of what was given to attention as its mask, `collected` of what Python's collector freed."""

    def __init__(self, tracker):
        self.last, self.masks, self.collected, self._tracker = {}, set(), set(), tracker
        self._begun = None  # how many events there were when the collector began

    def __enter__(self):
        gc.callbacks.append(self._collecting)

    def __exit__(self, *exception):
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase, info):
        events = self._tracker.events
        if phase == "start":
            self._begun = len(events)
        elif self._begun is not None:
            self.collected.update(number for _, number, delta in events[self._begun :] if delta < 0)

    def follow(self, func, args, kwargs, outputs):
        """Note what an operation, the last one, was given."""
        at = len(self._tracker.ops) - 1
        self.last.update(dict.fromkeys(self._tracker.numbers_of((args, kwargs, outputs)), at))
        if func.__name__.startswith(ATTENTION):
            named = zip(func._schema.arguments, args, strict=False)
            given = [each for argument, each in named if argument.name in MASKS] + [kwargs.get(name) for name in MASKS]
            self.masks |= self._tracker.numbers_of([each for each in given if isinstance(each, torch.Tensor)])
