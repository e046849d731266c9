"""Recomputation: what a module made in forward is dropped when it returns, and made again when its backward begins."""

from itertools import accumulate
from typing import NamedTuple

from ...common.ledger import ACTIVATIONS
from ...memory.storage_records import BACKWARD
from ..recorded_timeline import inside


class Calls(NamedTuple):
    """The calls of the modules that `paths(timeline)` names, and what of them a recomputation takes and makes."""

    paths: object

    def kept(self, timeline):
        """List what they keep for backward."""
        return [i for _, kept, _ in self._again(timeline) for i in kept]

    def until_backward(self, timeline, records):
        """From a call's return until it is made again."""
        return [(i, call.end + 1, again) for call, kept, again in self._again(timeline) for i in kept if i in records]

    def once_more(self, timeline):
        """List the spans of what a call begins from, until it is made again, and of its temporaries then."""
        spans = []
        for call, kept, again in self._again(timeline):
            spans += [(int(timeline.freed[i]), again, int(timeline.nbytes[i])) for i in call.inputs]
            begins_with = timeline.nbytes[timeline.born == again].sum()  # once it is there
            more = _highest(timeline, call) - timeline.nbytes[kept].sum() - begins_with
            spans.append((again, again + 1, max(0, int(more))))
        return spans

    def _again(self, timeline):
        """List (call, what it keeps, the row in which it is made again)."""
        paths, found = self.paths(timeline), []
        for call in timeline.recording.calls:
            kept = timeline.kept_by(call) if call.path in paths else []
            kept = [i for i in kept if timeline.categories[i] == ACTIVATIONS]
            if kept:
                found.append((call, kept, timeline.begins_backward(min(kept, key=lambda i: timeline.freed[i]), call)))
        return found


def blocks(timeline):
    """Return the paths of the repeated blocks that are not recomputed yet (`refimpl.checkpointing.recompute`)."""
    again = {each.module for each in timeline.records if each.phase == BACKWARD and (each.saved or each.offered)}
    return {path for model in timeline.recording.models for path in model.blocks
            if not any(inside(module, path) for module in again)}


def mlps(timeline):
    """Return the paths of the MLPs that are modules of their own (`refimpl.mlp.memory_efficient_mlps`)."""
    return {path for model in timeline.recording.models for path in model.mlps}


BLOCKS, MLPS = Calls(blocks), Calls(mlps)


def no_blocks(timeline):
    """Say why no block can be recomputed."""
    if not any(model.blocks for model in timeline.recording.models):
        return "no repeated blocks in the model: give the modules yourself"
    found = blocks(timeline)
    if found and not any(call.path in found for call in timeline.recording.calls):
        return (f"{len(found)} blocks, as {min(found)}, are compiled into one graph, so that none returns: recompute "
                "them before torch.compile, or lower torch._functorch.config.activation_memory_budget")
    return "" if found else "every block is recomputed already"


def _highest(timeline, call):
    """The most bytes of what a call made, at any row up to where it saved its last: made again, it ends there."""
    made = [i for i in timeline.made_in(call) if timeline.born[i] <= call.last_saving]
    changes = [(int(timeline.born[i]), int(timeline.nbytes[i])) for i in made]
    changes += [(min(int(timeline.freed[i]), call.end + 1), -int(timeline.nbytes[i])) for i in made]
    return max(accumulate(nbytes for _, nbytes in sorted(changes)), default=0)
