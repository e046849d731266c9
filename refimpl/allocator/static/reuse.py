"""ActivationReuseOptimizer: a step that records itself, plans, and from then on runs in its arena.

    call 1         as always: optimizers make their states
    call 2         recorded, and planned
    from call 3    in the arena; a departure is noted, and the plan is revised or recorded anew

A step with other shapes is another step, with a plan of its own. All of them share one arena, as large as the largest
plan: only one of them runs at a time. What a step returns stays with the caller, so it has places of its own.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ...common.lifetimes import Lifetimes
from .arena import Arena
from .execute import OCCUPIED, execute
from .graphed import PlayedStep, aside
from .static_plan import PLACEMENTS, plan_static
from .step_recording import record_step


class ActivationReuseOptimizer:
    """Calls a step so that what it makes has the same addresses each time: activations, gradients and all else.

    `train = ActivationReuseOptimizer(step)`, then `loss = train(batch)` in place of `step(batch)`. Outputs, gradients
    and parameters are those of the step alone, to the bit.

    - `warmup`: calls, with each new shape of arguments, that run as always before one is recorded.
    - `placements`: how long the plan is searched for; see `plan_static`.
    - `graph`: on CUDA, capture the planned step, and play it from then on: no call goes to the allocator. See `graphed`
      for what such a step may do; that it does other than was recorded is only noticed from its arguments.

    `plan`: of the last call; `arena`; `last`: its Execution, None for a call that was not planned; `departures`: a
    Counter of kinds over all calls. What the step returns may be kept: while somebody has it, its place is not given
    away. Two of each have a place; a third that is kept, too, is made outside of the arena.
    """

    def __init__(self, step: Callable[..., Any], *, warmup: int = 1, placements: int = PLACEMENTS,
                 graph: bool = False) -> None:
        if graph and not torch.cuda.is_available():
            raise ValueError("graph=True needs a CUDA device: without one, leave it out")
        self.step, self.warmup, self.placements, self.graph = step, warmup, placements, graph
        self.plan = self.arena = self.last = None
        self.departures = Counter()
        self._calls, self._planned, self._played = Counter(), {}, {}  # all by the arguments' shapes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and return what it returns."""
        which = _shapes(args, kwargs)
        if which in self._played:
            return self._played[which](*args, **kwargs)
        if which in self._planned:
            return (self._play if self.graph else self._execute)(which, args, kwargs)
        self.last = None
        if self._calls[which] < self.warmup:
            self._calls[which] += 1
            return self._alone(self.step, *args, **kwargs)
        result, trace = self._alone(record_step, self.step, *args, **kwargs)
        self._make_plan(which, trace)
        return result

    def _alone(self, function, *args, **kwargs):
        """Call a function, on a stream of its own if the step is captured later."""
        return aside(function, *args, **kwargs) if self.graph else function(*args, **kwargs)

    def _make_plan(self, which, trace, outliving=frozenset(), results=None):
        """Plan a step. What it returns has places of its own, two of each: the caller may have the last one still.
        Blocks that outlive the call for another reason have their places from its begin to its end."""
        lifetimes, blocks = Lifetimes.of(trace), sorted(outliving)
        begins, ends, nbytes = lifetimes.begins.copy(), lifetimes.ends.copy(), lifetimes.nbytes.copy()
        # live through the whole step, so that nobody shares them
        begins[blocks], ends[blocks] = 0, max(1, len(trace.events))
        nbytes[sorted(trace.result)] = 0  # not in the plan: they outlive the call
        self.plan = plan_static(Lifetimes(begins, ends, nbytes), alignment=trace.alignment, placements=self.placements)
        self._planned[which] = trace, self.plan, outliving, results or _places(trace, lifetimes)
        if self.arena is None or self.arena.nbytes < self.plan.nbytes:
            self.arena = None  # before the larger one is made
            self.arena = Arena(self.plan.nbytes, trace.device, trace.alignment)

    def _execute(self, which, args, kwargs):
        trace, self.plan, outliving, results = self._planned[which]
        self.last = execution = execute(self.step, *args, trace=trace, plan=self.plan, arena=self.arena,
                                        results=results, **kwargs)
        self.departures.update(each.kind for each in execution.departures)
        kinds = {each.kind for each in execution.departures}
        result, execution.result = execution.result, None  # else this object would keep it alive
        if kinds - {OCCUPIED}:
            del self._planned[which]  # the next call with these shapes is recorded
        elif longer := {each.block for each in execution.departures} - {None} - outliving - trace.result:
            self._make_plan(which, trace, outliving | longer, results)
        return result

    def _play(self, which, args, kwargs):
        """Capture the step, in an arena of its own: a graph never lets its addresses go."""
        trace, *_ = self._planned[which]
        self.plan = plan_static(trace, alignment=trace.alignment, placements=self.placements)
        self.arena = Arena(self.plan.nbytes, trace.device, trace.alignment)
        played = self._played[which] = PlayedStep(self.step, args, kwargs, trace, self.plan, self.arena)
        result, played.first = played.first, None
        return result

    def __repr__(self):
        return (f"{self.plan!r}\n{self.arena!r}" if self.plan else "not planned yet") + "".join(
            f"\n{count} departures: {kind}" for kind, count in self.departures.items())


def _places(trace, lifetimes):
    """Return {block: two places} of what the step returns, in an arena of their own."""
    sizes, offsets, top = lifetimes.aligned(trace.alignment).tolist(), {}, 0
    for block in sorted(trace.result):
        offsets[block], top = (top, top + sizes[block]), top + 2 * sizes[block]
    arena = Arena(top, trace.device, trace.alignment)
    return {block: [(arena, offset) for offset in each] for block, each in offsets.items()}


def _shapes(args, kwargs):
    """Return what tells one kind of call from another: shapes and dtypes of tensors, types of all else."""
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), tuple((tuple(each.shape), each.dtype, str(each.device)) if isinstance(each, torch.Tensor)
                                 else type(each) for each in leaves)


