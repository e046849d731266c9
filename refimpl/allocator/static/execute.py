"""A step inside an arena: each tensor that an operation makes is at the address that the plan chose.

    operation 17, mm   plan: block 9 has bytes 4,096 to 12,288   mm.out(a, b, out=arena[4096:12288])

Before an operation writes, two things are held against the plan: that this is the operation of the recording, with the
same layouts, and that no live tensor is at that address. If it is another operation, the rest of the step runs as it
would without a plan. If a live tensor is there, this one tensor is made elsewhere. Nothing is overwritten either way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .arena import Arena
from .out_variants import write, writes_directly
from .static_plan import StaticPlan, plan_static
from .step_recording import StepTrace, key_of

ORDER, LAYOUT, OCCUPIED, LONGER, SHORTER = "order", "layout", "occupied", "longer", "shorter"


class Departure(NamedTuple):
    """Where a step left its plan: the operation's number and name, a kind, and a sentence.

    `kind`: "order" (another operation than planned), "layout" (the same one on other shapes), "longer" (more
    operations than planned), "shorter" (fewer), or "occupied" (a tensor lives longer than planned: `block`).
    `nbytes`: of the tensor that is made outside of the arena for it.
    """

    operation: int
    name: str
    kind: str
    text: str
    block: int | None = None
    nbytes: int = 0

    def __str__(self):
        return f"operation {self.operation}, {self.name}: {self.text}"


@dataclass
class Execution:
    """How a step ran: what it returned, and where it left the plan.

    - `inside`: tensors that were made in the arena. `outside`: {operation: the most bytes that one call of it made
      outside, before they were copied into the arena}, of the operations without an `out=` of their own.
    """

    result: object
    plan: StaticPlan
    arena: Arena
    departures: list = field(default_factory=list)
    inside: int = 0
    outside: dict = field(default_factory=dict)

    @property
    def most_outside(self):
        """Return the bytes that stood outside of the arena at most, as long as the step keeps to its plan."""
        return max(self.outside.values(), default=0)

    def __repr__(self):
        text = (f"{self.inside:,} tensors in {self.arena.nbytes:,} bytes; {self.most_outside:,} bytes or less outside, "
                f"of {len(self.outside)} operations")
        return "\n".join([text, *map(str, self.departures[:5])])


def execute(step: Callable[..., Any], *args: Any, trace: Any, plan: StaticPlan | None = None, arena: Any = None,
            results: Any = None, **kwargs: Any) -> Any:
    """Run `step(*args, **kwargs)` in an arena, by the plan of a step that was recorded. Returns an Execution.

    - `trace`: the StepTrace of `record_step`. `plan`: of `plan_static(trace)`, the default. `arena`: one that is large
      enough, by default a new one.
    - `results`: places of blocks that are not in the plan, {block: [(arena, offset), …]}; the first free one is taken.

    Operations that have no `out=` of their own compute as always, and what they made is copied into the arena: so
    besides the arena stands at most the largest of what they make. A step that does other than was recorded runs to
    its end all the same; `departures` says where. TypeError for another trace, ValueError for a plan of another trace
    or an arena that is too small.
    """
    if not isinstance(trace, StepTrace):
        raise TypeError(f"trace is a {type(trace).__name__}: expected the StepTrace of record_step(step, …)")
    plan, results = plan_static(trace, alignment=trace.alignment) if plan is None else plan, results or {}
    if len(plan.offsets) != len(trace.blocks) or any(
            b not in results for b in np.flatnonzero(plan.sizes < trace.blocks["nbytes"]).tolist()):
        raise ValueError(f"a plan of {len(plan.offsets)} blocks for a trace of {len(trace.blocks)}, or of smaller "
                         "ones: expected plan_static(trace)")
    arena = Arena(plan.nbytes, trace.device, trace.alignment) if arena is None else arena
    if arena.nbytes < plan.nbytes or arena.device.type != trace.device.type:
        raise ValueError(f"{arena}: expected {plan.nbytes:,} bytes on {trace.device}")
    follower = Follower(trace, plan, arena, results)
    with follower:
        result = step(*args, **kwargs)
    follower.end()
    return Execution(result, plan, arena, follower.departures, follower.inside, follower.outside)


class Follower(TorchDispatchMode):
    """Runs operations by the plan, in the order of the recording; see `execute`."""

    def __init__(self, trace, plan, arena, results):
        super().__init__()
        self._operations, self._trace, self._left = trace.operations, id(trace), False
        self._arena, self._offsets, self._results = arena, plan.offsets.tolist(), results
        self.at, self.inside, self.departures, self.outside = 0, 0, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._left:
            return func(*args, **kwargs)
        at, self.at = self.at, self.at + 1  # operations are known by their number alone
        planned = self._operations[at] if at < len(self._operations) else None
        if planned is None or planned.func is not func:
            return self._leave(at, func, planned, args, kwargs)
        if planned.key is None:  # it made nothing: its layouts decide nothing
            return func(*args, **kwargs)
        if planned.key != key_of(args, kwargs):
            return self._leave(at, func, planned, args, kwargs)
        return self._run(at, func, args, kwargs, planned.made)

    def _run(self, at, func, args, kwargs, made):
        """Run an operation into the arena; what has no room there is made outside."""
        outs = [each and self._tensor(at, func, each) for each in made]
        # one of its outputs has no room: all are made outside
        if any(each is not None and out is None for each, out in zip(made, outs, strict=True)):
            return func(*args, **kwargs)
        nbytes = write(func, args, kwargs, outs)
        self.inside += len(outs) - outs.count(None)
        if nbytes:
            name = func.name().removeprefix("aten::")
            self.outside[name] = max(nbytes, self.outside.get(name, 0))
        returned = [str(each.type) for each in func._schema.returns]
        return outs[0] if returned == ["Tensor"] else outs if len(returned) == 1 else tuple(outs)

    def _tensor(self, at, func, made):
        """Return a tensor at the address that was planned, or None if a live tensor is there."""
        for arena, offset in self._results.get(made.block) or [(self._arena, self._offsets[made.block])]:
            low = arena.occupant(offset, made.nbytes)
            if low is None:
                return arena.empty_strided(offset, made.size, made.stride, made.dtype, made.nbytes,
                                           (self._trace, made.block))
        trace, block = arena.name_at(low)
        self._note(at, func, OCCUPIED, f"{made.nbytes:,} bytes at {offset:,} are not free: the tensor at {low:,} lives "
                   "longer than planned; made outside of the arena", block if trace == self._trace else None,
                   made.nbytes)
        return None

    def _leave(self, at, func, planned, args, kwargs):
        """Run the rest of the step without the plan."""
        self._left = True
        if planned is None:
            kind, text = LONGER, f"the plan ends after {len(self._operations)} operations"
        elif planned.func is not func:
            kind, text = ORDER, f"the plan has {planned.func.name()} here"
        else:
            kind, text = LAYOUT, f"other layouts than planned: {_difference(planned.key, key_of(args, kwargs))}"
        self._note(at, func, kind, f"{text}; the rest of the step runs outside of the arena")
        return func(*args, **kwargs)

    def _note(self, at, func, kind, text, block=None, nbytes=0):
        self.departures.append(Departure(at, func.name().removeprefix("aten::"), kind, text, block, nbytes))

    def end(self):
        """Note a step that ended early."""
        if not self._left and self.at < len(self._operations):
            missing = self._operations[self.at].func.name()
            self.departures.append(Departure(self.at, missing, SHORTER, f"the step ended after {self.at} of "
                                             f"{len(self._operations)} operations"))


def _difference(planned, found):
    for a, b in zip(planned, found, strict=False):
        if a != b:
            return f"{_shown(a)}, now {_shown(b)}"
    return f"{len(planned)} arguments, now {len(found)}"


def _shown(key):
    return list(key[0]) if isinstance(key, tuple) and key and isinstance(key[0], torch.Size) else key


def without_out(trace: Any) -> dict[str, tuple[int, int]]:
    """Return {operation: (calls, the most bytes that one makes)} of those that have no `out=` of their own on the
    trace's device: they compute outside of the arena, and what they made is copied."""
    found = {}
    for operation in trace.operations:
        nbytes = sum(made.nbytes for made in operation.made if made is not None)
        if nbytes and not writes_directly(operation.func, trace.device.type):
            name = operation.func.name().removeprefix("aten::")
            calls, most = found.get(name, (0, 0))
            found[name] = calls + 1, max(most, nbytes)
    return found
