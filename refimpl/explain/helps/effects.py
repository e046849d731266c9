"""What each technique does to the bytes of a step: one table, EFFECTS.

Read a row as a sentence: "ZeRO-1 cuts the optimizer's state to 1/8; of the update's temporaries nothing is left".
"""

from typing import NamedTuple

import numpy as np

from ...common.ledger import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from ...memory.tracking.taking import WORKSPACE
from ..kinds import CASTS, COPIES, OF_LOSS, OF_SCORES, OTHER, UPDATE, Kinds
from . import batches, head, packed, recomputed, states, tiles
from .found import Found

RANKS = 8
AS_THE_BATCH = (*OF_LOSS, *OF_SCORES, OTHER, WORKSPACE)  # temporaries that are as large as the batch


class Effect(NamedTuple):
    """1/`parts` of the bytes of some storages is left, nothing if 0, in the rows [(first, row after the last)] of
    `when(timeline, i)`. `what`: categories and kinds, or one function of the timeline that lists records."""

    what: tuple
    parts: int = 0
    when: object = lambda timeline, i: [timeline.whole(i)[:2]]  # from birth until freed

    def records(self, timeline, kinds):
        """List the storages that it is about."""
        if callable(self.what[0]):
            return self.what[0](timeline)
        return [i for i in np.flatnonzero(timeline.nbytes).tolist()
                if timeline.categories[i] in self.what or kinds[i] in self.what]

    def spans(self, timeline, records):
        """List (first row, row after the last, -bytes) of storages."""
        whole = [(i, -int(timeline.nbytes[i])) for i in records]
        return [(first, after, nbytes * (self.parts - 1) // self.parts if self.parts else nbytes)
                for i, nbytes in whole for first, after in self.when(timeline, i)]


def dropped(*what, **when):
    """Leave nothing of storages."""
    return Effect(what, **when)


moved = dropped  # to the host: nothing is left on the device


def cut(*what):
    """Leave a rank's part of storages."""
    return Effect(what, RANKS)


class Row(NamedTuple):
    """What one technique does: where two effects name a storage, the last decides. It saves nothing where
    `unless(timeline)` gives a reason, and where the first effect finds nothing. `bound` and `loose` are Found's."""

    effects: list
    bound: str = "buckets, and what is whole for a moment, come on top"
    loose: bool = True  # a bound has to count all that can be cut
    nothing: str = ""
    unless: object = lambda timeline: None

    def __call__(self, timeline):
        """Return a Found, or why nothing is saved."""
        if why := self.unless(timeline):
            return why
        kinds, spans, decided, records = Kinds(timeline), [], set(), []
        for effect in reversed(self.effects):
            records = effect.records(timeline, kinds)
            spans += effect.spans(timeline, set(records) - decided)
            decided |= set(records)
        nothing = self.nothing or f"there is nothing of {' or '.join(map(str, self.effects[0].what))}"
        return Found(spans, self.bound, self.loose) if spans and records else nothing


EFFECTS = {
    "none": Row([dropped(GRADIENTS, when=states.between_steps)], bound="in backward they come back one after the other",
                loose=False, nothing="gradients are None already while the forward runs"),
    "no_grad": Row([dropped(states.saved_for_no_backward)], bound="what the program itself keeps stays", loose=False,
                   nothing="every forward here has its backward"),
    "autocast": states.half_precision,  # cuts what has 32 bits to 1/2, and drops second copies of gradients
    "accumulate": batches.in_two,  # cuts what is made of rows to 1/2; gradients wait for the other part
    "rows": batches.row_by_row,  # to one row
    "recompute": recomputed.blocks,  # drops what blocks keep, from their return until their backward
    "masks": packed.lossless,  # packs what is saved, from its last use in forward until its backward
    "bf16": packed.bf16,
    "int8": packed.int8,
    "host": packed.on_the_host,  # moves it, for the same rows
    "chunks": Row([cut(ACTIVATIONS), cut(*AS_THE_BATCH), dropped(*OF_SCORES)], unless=states.no_sequence,
                  bound="keys, values and their gradients stay for all chunks"),
    "logits": head.without_logits,  # drops rows as wide as the vocabulary, and puts those of some tokens in place
    "mlp": recomputed.mlps,  # drops what MLPs keep, as `recompute` does
    "attention": tiles.tiles,  # drops scores, and puts tiles in place
    "data": Row([cut(ACTIVATIONS, INPUTS), cut(*AS_THE_BATCH)],
                unless=lambda timeline: "the batch has one row" if batches.most_rows(timeline) == 1 else None,
                bound="gradients on their way are in buckets"),
    "zero1": Row([cut(OPTIMIZER_STATE), dropped(UPDATE)]),
    "zero2": Row([cut(OPTIMIZER_STATE, GRADIENTS), dropped(UPDATE)]),
    "zero3": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS), dropped(UPDATE)]),
    "offload": Row([moved(OPTIMIZER_STATE, GRADIENTS), dropped(UPDATE)],
                   bound="where the device has a memory of its own; a bucket is there in turn"),
    "compression": lambda timeline: "it saves bytes on the wire, none in memory",
    "tensor": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS), cut(*AS_THE_BATCH, COPIES, CASTS),
                   dropped(UPDATE)], bound="norms, and activations between the layers, stay whole"),
    "context": Row([cut(ACTIVATIONS, INPUTS), cut(*AS_THE_BATCH), dropped(*OF_SCORES)], unless=states.no_sequence,
                   bound="keys and values of others pass by"),
    "pipeline": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS), cut(*AS_THE_BATCH, COPIES, CASTS),
                     dropped(UPDATE)], bound="ranks with the embedding or the head hold more; the first keeps as many "
                                             "micro-batches as there are ranks"),
    "allocator": states.fragments,  # takes back what is reserved and not allocated
}
