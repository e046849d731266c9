"""Recomputation: what a module made in forward is dropped when it returns, and made again when its backward begins."""

import numpy as np

from ...common.ledger import ACTIVATIONS
from ...memory.storage_records import BACKWARD
from ..recorded_timeline import inside
from .found import RETAINED, Found


def blocks(timeline):
    """Recompute every repeated block (`refimpl.checkpointing.recompute`)."""
    paths = {path for model in timeline.recording.models for path in model.blocks}
    if not paths:
        return "no repeated blocks in the model: give the modules yourself"
    again = {each.module for each in timeline.records if each.phase == BACKWARD and (each.saved or each.offered)}
    paths = {path for path in paths if not any(inside(module, path) for module in again)}
    if not paths:
        return "every block is recomputed already"
    return _dropped(timeline, paths) or _nothing(timeline, "blocks")


def mlps(timeline):
    """Compute the hidden layer of every MLP again (`refimpl.mlp.memory_efficient_mlps`)."""
    paths = {path for model in timeline.recording.models for path in model.mlps}
    if not paths:
        return "no MLP here is a module of its own, that drops out nothing and has no hooks"
    return _dropped(timeline, paths) or _nothing(timeline, "MLPs")


def _nothing(timeline, what):
    return RETAINED if timeline.retained else f"the {what} keep nothing for backward"


def _dropped(timeline, paths):
    spans = []
    for call in timeline.recording.calls:
        if call.path not in paths:
            continue
        kept = [i for i in timeline.kept_by(call) if timeline.categories[i] == ACTIVATIONS]
        if not kept:
            continue
        again = max(timeline.begins_backward(min(kept, key=lambda i: timeline.freed[i]), call.path), call.end + 1)
        spans += [(call.end + 1, again, -timeline.nbytes[i]) for i in kept]
        spans += [(int(timeline.freed[i]), again, int(timeline.nbytes[i])) for i in call.inputs]  # what it begins from
        begins_with = sum(int(timeline.nbytes[i]) for i in np.flatnonzero(timeline.born == again))  # once it is there
        more = _highest(timeline, call) - sum(int(timeline.nbytes[i]) for i in kept) - begins_with
        spans.append((again, again + 1, max(0, more)))  # the forward's own temporaries, once more
    return Found(spans) if spans else None


def _highest(timeline, call):
    """The most bytes of what a call made, at any row up to where it saved its last: made again, it ends there."""
    changes = {}
    for i in timeline.made_in(call):
        if timeline.born[i] > call.last_saving:
            continue
        changes[int(timeline.born[i])] = changes.get(int(timeline.born[i]), 0) + int(timeline.nbytes[i])
        freed = min(int(timeline.freed[i]), call.end + 1)
        changes[freed] = changes.get(freed, 0) - int(timeline.nbytes[i])
    held = highest = 0
    for row in sorted(changes):
        held += changes[row]
        highest = max(highest, held)
    return highest
