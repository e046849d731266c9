"""Recomputation: what a module made in forward is dropped when it returns, and made again when its backward begins."""

from ...ground.ledger import ACTIVATIONS
from ...memory.records import BACKWARD
from ..replay import inside
from .found import RETAINED, Found


def blocks(replay):
    """Recompute every repeated block (`refimpl.checkpointing.recompute`)."""
    paths = {path for model in replay.recording.models for path in model.blocks}
    if not paths:
        return "no repeated blocks in the model: give the modules yourself"
    again = {each.module for each in replay.records if each.phase == BACKWARD and (each.saved or each.offered)}
    paths = {path for path in paths if not any(inside(module, path) for module in again)}
    if not paths:
        return "every block is recomputed already"
    return _dropped(replay, paths) or _nothing(replay, "blocks")


def mlps(replay):
    """Compute the hidden layer of every MLP again (`refimpl.mlp.memory_efficient_mlps`)."""
    paths = {path for model in replay.recording.models for path in model.mlps}
    if not paths:
        return "no MLP here is a module of its own, that drops out nothing and has no hooks"
    return _dropped(replay, paths) or _nothing(replay, "MLPs")


def _nothing(replay, what):
    return RETAINED if replay.retained else f"the {what} keep nothing for backward"


def _dropped(replay, paths):
    spans = []
    for call in replay.recording.calls:
        if call.path not in paths:
            continue
        kept = [i for i in replay.kept_by(call) if replay.categories[i] == ACTIVATIONS]
        if not kept:
            continue
        again = max(replay.begins_backward(min(kept, key=lambda i: replay.freed[i]), call.path), call.end + 1)
        spans += [(call.end + 1, again, -replay.nbytes[i]) for i in kept]
        spans += [(int(replay.freed[i]), again, int(replay.nbytes[i])) for i in call.inputs]  # what it begins from
        more = _highest(replay, call) - sum(int(replay.nbytes[i]) for i in kept)
        spans.append((again, again + 1, max(0, more)))  # the forward's own temporaries, once more
    return Found(spans) if spans else None


def _highest(replay, call):
    """The most bytes of what a call made, at any of its rows."""
    changes = {}
    for i in replay.made_in(call):
        changes[int(replay.born[i])] = changes.get(int(replay.born[i]), 0) + int(replay.nbytes[i])
        freed = min(int(replay.freed[i]), call.end + 1)
        changes[freed] = changes.get(freed, 0) - int(replay.nbytes[i])
    held = highest = 0
    for row in sorted(changes):
        held += changes[row]
        highest = max(highest, held)
    return highest
