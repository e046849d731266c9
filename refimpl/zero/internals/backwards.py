"""Tells when the backward of a module begins and when it has ended, and leaves autograd's graph as it is.

Autograd runs operations in the reverse order of their forward: each has a sequence number, and of those that are ready
the highest runs first (torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`). So when a gradient reaches the output of
a module, its backward begins, and those of all modules that were called after it had returned have ended.

A function that passes tensors on at the module's entrance, as FSDP2 has one, would see the end, too. But it would add
up by itself what the module contributes to a tensor that others take as well, such as an encoder's output: another
order of additions, and other last bits.
"""

import bisect
import dataclasses
from collections import defaultdict, deque

import torch
from torch.utils import _pytree as pytree

LEAF = 2**63  # the sequence number of a sum into a leaf is above
KEPT = 1000  # calls of a module without gradients that are remembered, in case they are recomputed


@dataclasses.dataclass(eq=False)
class ForwardCall:
    """One call of a module's forward. `forward`: the number of the model's forward that made it. `begin`, `end`: its
    places among the beginnings and ends of all calls."""

    module: torch.nn.Module
    forward: int
    begin: int
    end: int = -1
    late: tuple = ()  # autograd's sequence numbers of what was computed after the output: first, last


class Backwards:
    """Follows the calls of modules in forward, and their backwards. `begun(module)` and `ended(module)` are called when
    a backward begins and when it has ended.

    A region that is recomputed with `use_reentrant=True` runs twice: without gradients, and again inside backward, in a
    graph of its own. The second call takes the place of the first in the order. Several forwards may be followed by
    their backwards in any order, as a pipeline runs them.
    """

    def __init__(self, begun, ended):
        self._begun, self._ended = begun, ended
        self._forward, self._current = 0, 0  # the number of the last forward; of the one whose backward runs
        self._place, self._stack = 0, []  # the number of calls' ends so far; calls that have begun
        self._open = []  # calls whose backward has begun
        self._late = []  # calls that computed more after their output
        self._without_graph = defaultdict(lambda: deque(maxlen=KEPT))  # module → calls that may be recomputed
        self.evaluating = False  # whether calls without gradients are not to be recomputed

    def forward_begins(self):
        """Note that a forward of the model begins."""
        self._forward += 1

    def enter(self, module, in_backward):
        """Note that a forward of `module` begins; `in_backward`: it is a recomputation."""
        call, earlier = ForwardCall(module, self._forward, self._next()), self._without_graph[module]
        if in_backward and torch.is_grad_enabled() and earlier:
            call = next((each for each in reversed(earlier) if each.forward == self._current), earlier[-1])
            earlier.remove(call)  # recomputed, it has the place in the order that it had
            self._current = call.forward
            self._end_after(call)
        self._stack.append(call)

    def leave(self, output, in_backward):
        """Note that the last forward that began has ended, with this output. Return whether a backward may follow."""
        call = self._stack.pop()
        recomputed = call.end >= 0
        call.end = call.end if recomputed else self._next()
        tensors = [x for x in tensors_in(output) if x.requires_grad]
        if not (torch.is_grad_enabled() or in_backward or self.evaluating):
            self._without_graph[call.module].append(call)
        if not torch.is_grad_enabled() or not tensors:
            return False
        made = 1 + max(x.grad_fn._sequence_nr() if x.grad_fn is not None else -1 for x in tensors)
        if 0 < made < torch._C._autograd._get_sequence_nr():
            call.late = made, torch._C._autograd._get_sequence_nr() - 1
            self._late.append(call)
        if recomputed or not in_backward:
            # any: its backward begins when the first gradient reaches one of its outputs
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: self._begin(call), mode="any")
        return True

    def begin_early(self, output):
        """Before a backward: let it begin those of modules that computed more after their output, of which the loss
        depends by another way (`self.balance = …`), with the last thing that they computed."""
        if not self._late:
            return
        nodes = sorted(_graph(tensors_in(output)), key=lambda node: node._sequence_nr())
        numbers = [node._sequence_nr() for node in nodes]
        for call in self._late:
            first, last = call.late
            found = bisect.bisect_right(numbers, last) - 1
            if found >= 0 and numbers[found] >= first:
                nodes[found].register_prehook(lambda _, call=call: self._begin(call))

    def is_recomputed_later(self, module):
        """Tell whether a call without gradients may still be recomputed in this backward, and then have one, too."""
        return any(call.forward == self._current for call in self._without_graph[module])

    def end_all(self):
        """End the open backwards: autograd has run all of its operations."""
        self._end(list(self._open))

    def drop(self):
        """Forget the open backwards, without ending them."""
        self._open = []

    def forget(self):
        """Forget all calls without gradients: no recomputation follows."""
        self._without_graph.clear()
        self._late = []

    def _begin(self, call):
        self._current = call.forward
        self._end_after(call)
        if call in self._open:  # with what it computed after its output
            return
        self._open.append(call)
        self._begun(call.module)

    def _end_after(self, call):
        self._end([each for each in self._open if each.begin > call.end])

    def _end(self, calls):
        self._open = [each for each in self._open if each not in calls]
        for each in calls:
            self._ended(each.module)

    def _next(self):
        self._place += 1
        return self._place


def _graph(tensors):
    """Return the set of autograd's operations that these depend on, but the sums into leaves."""
    found, ahead = set(), [x.grad_fn for x in tensors if x.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node not in found and node._sequence_nr() < LEAF:
            found.add(node)
            ahead += [before for before, _ in node.next_functions if before is not None]
    return found


def tensors_in(output):
    """Yield the tensors in nested tuples, lists, dicts and dataclasses, such as a module's output."""
    for x in pytree.tree_leaves(output):
        if isinstance(x, torch.Tensor):
            yield x
        elif dataclasses.is_dataclass(x):
            yield from tensors_in([getattr(x, field.name) for field in dataclasses.fields(x)])


def is_opaque(output):
    """Tell whether an output has no tensor, but an object that may hide one."""
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
    return not any(True for _ in tensors_in(output)) and not all(
        isinstance(x, plain) for x in pytree.tree_leaves(output))
