"""A chain of functions run by a plan that says which of them are recomputed together, region within region.

A plan is data: a list of stage numbers in order, where a tuple is a region that is checkpointed, and tuples inside it
are regions of its recomputation. `[(0, 1), (2, 3), 4]` recomputes two and two and keeps what stage 4 saves;
`[((0, 1), 2, 3), 4]` recomputes 0 to 3 from one input, and 0 and 1 in that once more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from .region import check_keep, checkpointed, refuse_options_of_torch

if TYPE_CHECKING:
    import torch


def run_chain(functions: Sequence[Callable[..., Any]], plan: Sequence[Any], x: Any, *args: Any,
              keep: "Callable[[torch.Tensor], bool] | None" = None, **kwargs: Any) -> Any:
    """Run x through `functions` in order, each called as f(x, *args, **kwargs), with the regions of `plan`.

    `keep`: how the regions keep their inputs, as in `checkpoint`; all other keywords are the functions' own. ValueError
    for a plan that does not name every function once, in order; TypeError for an option of `torch.utils.checkpoint`.
    """
    functions = list(functions)
    refuse_options_of_torch(kwargs)  # a function with **kwargs would swallow them
    check_keep(keep)
    if list(stages_of(plan)) != list(range(len(functions))):
        raise ValueError(f"plan {plan!r} has the stages {list(stages_of(plan))}: expected 0 to {len(functions) - 1}, "
                         "each once and in order")
    return _run(functions, plan, keep, x, args, kwargs)


def _run(functions, plan, keep, x, args, kwargs):
    for item in plan:
        if isinstance(item, tuple):
            x = checkpointed(_run, (functions, item, keep, x, args, kwargs), {}, keep=keep)
        else:
            x = functions[item](x, *args, **kwargs)
    return x


def stages_of(plan):
    """Yield the stage numbers of a plan, without its regions."""
    for item in plan:
        if isinstance(item, tuple):
            yield from stages_of(item)
        else:
            yield item


def segments_plan(n: int, segments: int) -> list[Any]:
    """Return the plan of `checkpoint_sequential`. The first n mod segments regions have one stage more.

    ValueError unless 1 ≤ segments ≤ n.
    """
    if not isinstance(segments, int) or isinstance(segments, bool) or not 1 <= segments <= n:
        raise ValueError(f"segments={segments!r}: expected an integer from 1 to {n}, the functions given")
    plan, first = [], 0
    for i in range(segments):
        last = first + n // segments + (i < n % segments)
        plan.append(tuple(range(first, last)))
        first = last
    return [*plan[:-1], *plan[-1]]  # the last region is needed at once: recomputing it saves nothing


def checkpoint_sequential(functions: Sequence[Callable[..., Any]], segments: int, x: Any, *args: Any,
                          keep: "Callable[[torch.Tensor], bool] | None" = None, **kwargs: Any) -> Any:
    """Run x through `functions` one after another, each called as f(x, *args, **kwargs), in `segments` regions.

    All but the last region are recomputed: what the last one keeps is needed at once. With n equal functions that keep
    s bytes each and take a bytes, backward holds about

        s · n / segments + a · segments, least at √(n · s / a) segments

    which is √n where s = a ("Training Deep Nets with Sublinear Memory Cost", Chen et al. 2016, section 4.1).
    `keep`: how the regions keep their inputs, as in `checkpoint`; all other keywords are the functions' own. ValueError
    unless 1 ≤ segments ≤ n; TypeError for an option of `torch.utils.checkpoint`.
    """
    functions = list(functions)
    return run_chain(functions, segments_plan(len(functions), segments), x, *args, keep=keep, **kwargs)


class PlannedBlocks(nn.ModuleList):
    """Run a model's blocks by a plan, under the same keys: `model.blocks = PlannedBlocks(model.blocks, plan)`.

    A loop `for block in model.blocks: x = block(x)` gets one callable for each item of the plan; indexing, `len` and
    `state_dict` are those of the blocks. `keep`: how the regions keep their inputs, as in `checkpoint`.
    """

    def __init__(self, blocks: Sequence[nn.Module] = (), plan: Sequence[Any] | None = None,
                 keep: "Callable[[torch.Tensor], bool] | None" = None) -> None:
        # by index: iterating over a PlannedBlocks gives items of its plan
        blocks = [blocks[i] for i in range(len(blocks))]
        super().__init__(blocks)
        check_keep(keep)
        self.keep = keep
        self.plan = list(range(len(blocks))) if plan is None else plan
        if list(stages_of(self.plan)) != list(range(len(blocks))):
            raise ValueError(f"plan {plan!r}: expected the blocks 0 to {len(blocks) - 1}, each once and in order")

    def __iter__(self) -> Iterator[Any]:
        for item in self.plan:
            yield _Item(self, item)


class _Item:
    """Runs one item of the plan as if it were a block."""

    def __init__(self, blocks, item):
        self._blocks, self._item = blocks, item

    def __call__(self, x, *args, **kwargs):
        return _run(self._blocks, [self._item], self._blocks.keep, x, args, kwargs)


@contextmanager
def planned(model: nn.Module, plan: Sequence[Any],
            keep: "Callable[[torch.Tensor], bool] | None" = None) -> Iterator[nn.Module]:
    """Run `model.blocks` by `plan` in this context; afterwards they are as before: `with planned(model, plan): …`.

    `plan`: as in `run_chain`; None recomputes no block. `keep`: as in `checkpoint`. Yields the model. Raises what
    `PlannedBlocks` raises.
    """
    blocks = model.blocks
    model.blocks = PlannedBlocks(blocks, plan, keep)  # the same modules under the same keys: state_dict stays
    try:
        yield model
    finally:
        model.blocks = blocks
