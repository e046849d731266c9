"""Steps that no optimizer of torch.optim makes: after a backward the program itself changes what the backward reached.

    p.data -= lr * p.grad           p.sub_(lr * p.grad)             written in place
    p.data = p - lr * p.grad        w = (w - lr * w.grad).detach()  another storage in place of one that is gone

Such a step ends with the last of these changes. That it was the last is known when all have been written to and a model
is called, or else when the next backward begins: until something changes, micro-batches are added up.
"""

import functools
import weakref
from collections import Counter

import torch
from torch.optim import Optimizer

from ..common.ledger import INPUTS
from ..memory.storage_records import BACKWARD
from .phases import OPTIMIZER, Span


class HandWritten:
    """What updates some parameters by hand. `numbers`: of the records of these; `at`: (operations, records) that there
    were at the end of its last step; `parameters`: those of that step which are still there."""

    name = "an optimizer of its own"

    def __init__(self, shapes):
        self.shapes, self.numbers, self.at, self.parameters = shapes, set(), (0, 0), []


class HandWrittenSteps:
    """Finds the steps of a script that makes no optimizer of torch.optim: a context. `on_step(HandWritten)` is called
    when one has ended; `spans` are the updates."""

    def __init__(self, tracker):
        self.on_step, self.spans, self._tracker = None, [], tracker
        self._is_off, self._known = False, []
        self._begin_step()

    def _begin_step(self):
        self._waiting = {}  # number of a record -> its leaf, weakly: a backward went through it
        self._changed, self._at = set(), (0, 0)

    def __enter__(self):
        self._original = original = Optimizer.__init__

        @functools.wraps(original)
        def noted(*args, **kwargs):
            self.optimizer_made()
            original(*args, **kwargs)

        Optimizer.__init__ = noted
        return self

    def __exit__(self, *exception):
        Optimizer.__init__ = self._original

    def optimizer_made(self):
        """Note that the script has an optimizer of torch.optim, so that none is looked for."""
        self._is_off = True
        self._begin_step()

    def follow(self, func, args, kwargs):
        """Note what an operation outside of a model wrote to."""
        if not self._waiting or not getattr(getattr(func, "_schema", None), "is_mutable", False):
            return
        given = [*zip(func._schema.arguments, args, strict=False),
                 *((each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs)]
        written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        if numbers := self._tracker.numbers_of(written) & self._waiting.keys():
            self._changed |= numbers
            self._at = len(self._tracker.ops), len(self._tracker.records)

    def model_called(self):
        """Note that a model is called: if all has changed, a step has ended."""
        if self._changed and self._changed >= self._own():
            self._ended(self._changed)

    def backward_begins(self, tensors):
        """Note that a backward begins: what changed before it was a step."""
        if self._is_off or torch._C._current_graph_task_id() != -1:
            return
        leaves = {number: weakref.ref(leaf) for leaf in _leaves(tensors) for number in self._tracker.numbers_of(leaf)}
        own, records = self._own(), self._tracker.records
        new = {number for number in leaves.keys() - own if INPUTS not in records[number].roles}
        if changed := self._changed & own:
            self._ended(changed)
        elif self._are_gone(own) and self._shapes(own) == self._shapes(new):  # these are in their place
            self._at = max(records[number].born for number in new) + 1, max(new) + 1
            self._ended(own)
        self._waiting |= leaves

    def script_ended(self):
        """Note that nothing follows."""
        own = self._own()
        if changed := self._changed & own:
            self._ended(changed)
        elif self._known and self._are_gone(own):
            self._at = len(self._tracker.ops), len(self._tracker.records)
            self._ended(own)

    def _own(self):
        """Return the numbers of what may be trained: an input with a gradient is only if nothing else has one."""
        inputs = {number for number in self._waiting if INPUTS in self._tracker.records[number].roles}
        return self._waiting.keys() - inputs or inputs

    def _are_gone(self, numbers):
        return bool(numbers) and not any(self._tracker.records[number].alive for number in numbers)

    def _shapes(self, numbers):
        return Counter(self._tracker.records[number].shape for number in numbers)

    def _ended(self, changed):
        shapes = self._shapes(changed)
        found = next((each for each in self._known if each.numbers & changed or each.shapes == shapes), None)
        if found is None:
            self._known.append(found := HandWritten(shapes))
        found.numbers |= changed
        found.at, leaves = self._at, [self._waiting[number]() for number in changed]
        found.parameters = [leaf for leaf in leaves if leaf is not None]
        ops, end = self._tracker.ops, self._at[0]
        begin = next((i + 1 for i in reversed(range(end)) if ops[i].phase == BACKWARD), end)
        self.spans += [Span(OPTIMIZER, begin, end)] if begin < end else []
        self._begin_step()
        self.on_step(found)


def _leaves(tensors):
    """Yield the leaves that a backward from `tensors` reaches."""
    nodes = [tensor.grad_fn if isinstance(tensor, torch.Tensor) else tensor.node for tensor in tensors]
    met = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
