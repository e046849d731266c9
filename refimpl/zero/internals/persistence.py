"""What an engine holds, as shards that `refimpl.saving` saves and loads: it knows neither stages nor buckets."""

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from ... import saving
from ...comm.texts import gather_results
from ...saving import TrainingState
from ...sharding import Shard
from .writes import publish

if TYPE_CHECKING:
    from os import PathLike


def shards(engine: Any) -> list[Shard]:
    """Return a `sharding.Shard` of each tensor that this rank has a part of, bucket by bucket: parameters as they are
    updated, frozen ones and buffers."""
    found = []
    for bucket in engine.buckets:
        for piece, own in engine.update.pieces[bucket]:
            values = own.detach().view(-1) if own.is_contiguous() else own.detach()  # whole, in channels_last
            found.append(Shard(spec(engine, piece), values, "parameters", bucket.dtype, own,
                               owned(engine, bucket, piece), bucket))
    for bucket in engine.frozen_buckets:
        for piece, part in engine.parameters.frozen_pieces[bucket]:
            found.append(Shard(spec(engine, piece), part, "frozen", bucket.dtype, None, owned(engine, bucket, piece),
                               bucket))
    for kind, name, tensor in _rest(engine):
        whole = engine.specs[name]
        found.append(Shard(whole, tensor.detach(), kind, tensor.dtype, tensor if kind == "parameters" else None,
                           owned=whole if not engine.comm.rank and _counts(engine, whole) else None))
    return found


def spec(engine, piece):
    """Return the ShardSpec of a piece. In hybrid sharding all replicas hold it."""
    name = piece.slot.name
    cut = engine.specs[name].cut(piece.first, piece.end)
    if engine.stage:  # before, all is whole
        cut = dataclasses.replace(cut, order=piece.slot.order)
    return dataclasses.replace(cut, replicas=engine.holders[name]) if name in engine.holders else cut


def owned(engine, bucket, piece):
    """Return the part of a piece that this rank counts in norms, and saves: each element is one rank's. None if all of
    it is another's. At stage 0, where all ranks hold it, each has a share as if it were cut."""
    if not _counts(engine, spec(engine, piece)):
        return None
    if engine.stage or piece.first == piece.end:  # what has no elements is rank 0's
        return spec(engine, piece) if engine.stage or not engine.comm.rank else None
    mine = [each for each in bucket.pieces(engine.comm.rank) if each.slot is piece.slot]
    return spec(engine, mine[0]) if mine else None


def _counts(engine, whole):
    """Tell whether this rank is the first of those that hold the same part."""
    return not whole.replicas or min(whole.replicas) == engine.world.rank


def owned_gradients(engine):
    """Yield the gradients that this rank counts in norms, flat."""
    for bucket, pairs in engine.update.with_gradients():
        for piece, own in pairs:
            part = None if own.grad is None else owned(engine, bucket, piece)
            if part is not None:
                yield own.grad.reshape(-1)[part.first - piece.first : part.end - piece.first]


def _rest(engine):
    """Yield (kind, name, tensor) of what is whole on every rank: frozen parameters, buffers, and what is trained and
    has no elements."""
    in_shards = {slot.name for bucket in engine.frozen_buckets for slot in bucket.slots}
    for name, p in engine.model.named_parameters():
        if p in engine.reducer.place and engine.stage and not p.numel():
            yield "parameters", name, p
        elif p not in engine.reducer.place and name not in in_shards:
            yield "frozen", name, p
    for name, buffer in engine.model.named_buffers():
        yield "buffers", name, buffer


def training_state(engine, hook=True):
    """Return all that `refimpl.saving` needs to know. `hook`: whether what a communication hook keeps goes with it."""
    kept, about = engine.reducer.hook if hook else None, {"stage": engine.stage}
    if kept is not None and not kept.state_tensors():
        kept = None  # nothing to save
    if kept is not None:
        last = sum(bool(slot.order) for bucket in engine.buckets for slot in bucket.slots)
        about["own"] = f"{kept.about}, {last} parameters in channels_last" if last else kept.about
    own = {} if hook else None  # None: what was saved of another hook is left
    if kept is not None:
        own = kept.state_tensors()
    groups = [[engine.specs[name].name for name in names] for names in engine.update.group_names]
    return TrainingState(engine.world, shards(engine), engine.optimizer, groups, engine.model, engine._steps,
                         about, lambda bucket: _loaded(engine, bucket), own,
                         kept and kept.load_state_tensors)


def _loaded(engine, bucket):
    if bucket is None:
        return contextlib.nullcontext()
    return engine._stored.loaded(bucket) if bucket in engine.frozen_buckets else engine.update.loaded(bucket)


def save(engine: Any, directory: "str | PathLike[str]", *, shared: bool = True) -> None:
    """Save all state in `directory`, for any stage on any number of ranks to load: see `saving.save`. RuntimeError on
    all ranks if there are gradients."""
    saving.save(_between_steps(engine, "save"), directory, shared)


def load(engine: Any, directory: "str | PathLike[str]", *, hook: bool = True, shared: bool | None = None) -> None:
    """Load what an engine of any stage saved on any number of ranks: see `saving.load`. Gradients are dropped.

    What a communication hook kept is loaded into the same hook, on as many ranks: SavedStateError for another. With
    hook=False it is left.
    """
    _load(engine, "load", functools.partial(saving.load, shared=shared), directory, hook)


def state_dict(engine: Any) -> dict[str, Any]:
    """Return the whole state on rank 0, in host memory, and {} on the others: see `saving.state_dict`. RuntimeError on
    all ranks if there are gradients."""
    return saving.state_dict(_between_steps(engine, "state_dict"))


def load_state_dict(engine: Any, sd: dict[str, Any], *, hook: bool = True) -> None:
    """Load what `state_dict` returned, at any stage and on any number of ranks; rank 0's `sd` counts. Gradients are
    dropped. `hook` as in `load`."""
    _load(engine, "load_state_dict", saving.load_state_dict, sd, hook)


def save_weights(engine: Any, path: "str | PathLike[str]", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model alone to one safetensors file, on rank 0: see `saving.save_weights`."""
    engine.check_phase("save_weights")
    saving.save_weights(training_state(engine), path, dtype)


def _between_steps(engine, doing):
    """Return the state between two steps. RuntimeError on all ranks if one has gradients."""
    micro_batches = engine.reducer.micro_batches
    engine.check_phase(doing)

    def check():
        if micro_batches or engine.reducer.flat:
            raise RuntimeError(f"{doing} after {micro_batches} micro-batches of a step, and their gradients would be "
                               "lost: call engine.step() or engine.zero_grad() first")
    gather_results(engine.comm, check)
    return training_state(engine)


@torch.no_grad()
def _load(engine, doing, load, source, hook):
    engine.check_phase(doing)
    state = training_state(engine, hook)
    engine._steps = load(state, source)
    if engine._companion is not None:
        engine._companion.go_to(engine._steps, engine.param_groups)
    engine.zero_grad()  # they were of the values before
    publish(engine)
