"""Checks of what an engine is given to train."""

import torch

from ...comm.agreement import check_model, check_same
from ...sharding import check_ranks
from ..bucket import order_of


def trained_and_frozen(model, optimizer, store=None, update=None):
    """Return ([(name, parameter)] of what is trained, and of what is frozen). TypeError or ValueError for an optimizer
    that is made already, a store or an update of shards that are not there, a model without trained parameters, one
    with complex ones, and one on the meta device."""
    if store is not None:
        raise TypeError(f"store={store!r}: DataParallel has no shards to store; use Zero1, Zero2 or Zero3")
    if update is not None:
        raise TypeError(f"update={update!r}: DataParallel has no shards to update; use Zero1, Zero2 or Zero3")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is an {type(optimizer).__name__} already: expected what makes one, such as "
                        "functools.partial(torch.optim.AdamW, lr=1e-3)")
    named = list(model.named_parameters())
    if not any(p.requires_grad for _, p in named):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if on_meta := [name for name, p in named if p.device.type == "meta"]:
        raise ValueError(f"{on_meta[0]} is on the meta device: Zero3 gives such a model its values, unit by unit")
    if found := [name for name, p in named if p.requires_grad and p.is_complex()]:
        raise TypeError(f"{found[0]} is complex, and gradients are averaged, cut and saved as real numbers: keep it "
                        "as a real parameter, torch.view_as_real(x), and compute with torch.view_as_complex of it")
    return [(name, p) for name, p in named if p.requires_grad], [(name, p) for name, p in named if not p.requires_grad]


def check_frozen(frozen):
    """Raise RuntimeError if a parameter that was frozen is to be trained now."""
    if thawed := [name for name, p in frozen if p.requires_grad]:
        raise RuntimeError(f"{thawed[0]} requires a gradient now, and did not when the engine was made: it is in "
                           "no bucket and has no optimizer state. Make a new engine of the model")


def check_optimizer(comm, optimizer):
    """Raise CollectiveMismatch, naming the ranks and what they have, if optimizers are of another class or have other
    settings: shards of one tensor would follow different rules."""
    groups = [{name: _plain(value) for name, value in group.items() if name != "params"}
              for group in optimizer.param_groups]
    check_same(comm, "optimizer", f"{type(optimizer).__name__} {groups}")


def settings_of(engine):
    """Return {name: value} of how the last gradients were clipped, of the optimizer's class and of its settings by now,
    which a scheduler changes. A tensor's value stays out: a GPU would be waited for."""
    found = {**engine.clipped, "optimizer": type(engine.optimizer).__name__}
    for number, group in enumerate(engine.optimizer.param_groups):
        found |= {f"{name} in param group {number}": "a tensor" if isinstance(value, torch.Tensor) else _plain(value)
                  for name, value in group.items() if name != "params"}
    return found


def _plain(value):
    """Return a setting as it is alike on all ranks; of an object its class, as its text may be of this process."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def check_parts(engine):
    """Raise CollectiveMismatch if ranks with the same data do not train the same model; ValueError, on all ranks of a
    larger `world`, unless every element is on one rank, or on ranks that name each other as replicas."""
    from ...comm.same_model import code_of, text_of

    comm, model, world = engine.comm, engine.model, engine.world
    specs = [engine.specs[name] for name, _ in model.named_parameters()]
    check_model(comm, [f"{spec.name} {spec.shape} {spec.offsets} {spec.lengths} {spec.fused} {p.dtype} {order_of(p)}"
                       for spec, p in zip(specs, model.parameters(), strict=True)], text_of(model) + code_of(model))
    if world is not comm:
        check_ranks(world, specs, not comm.rank)  # the others have the same
