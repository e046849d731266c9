"""An optimizer that updates some of its parameters at a time, as engines do that go bucket by bucket: the temporary
tensors of a step are then those of one bucket."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def snapshot_groups(optimizer: "torch.optim.Optimizer") -> list[Any]:
    """Return [(parameters, options)] of an optimizer's param groups, as they are before a step."""
    return [(group["params"], {**group, "params": None}) for group in optimizer.param_groups]


def step_subset(optimizer: "torch.optim.Optimizer", parameters: "Iterable[torch.Tensor]", before: Any) -> None:
    """Run `optimizer.step()` with `parameters` alone in its param groups.

    `before`: what `snapshot_groups` returned before the first part of the step. Each part begins with the options of
    that moment, so that an optimizer that counts steps in its groups counts one. All parameters are in their groups
    again afterwards, also if the step raises.
    """
    some = {id(p) for p in parameters}  # by id: tensors compare by element
    for group, (params, options) in zip(optimizer.param_groups, before, strict=True):
        group.clear()  # in place: others may hold these dicts
        group.update(options, params=[p for p in params if id(p) in some])
    try:
        optimizer.step()
    finally:
        for group, (params, _) in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
