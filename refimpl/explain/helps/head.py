"""The loss without logits (`refimpl.cross_entropy`): rows of the vocabulary's width leave the recording."""

from collections import defaultdict

import torch

from ...cross_entropy import chunked_cross_entropy_bytes
from ...memory.storage_records import BACKWARD
from ...memory.tracking.taking import WORKSPACE
from ..kinds import OF_LOSS, Kinds
from .found import Found


def without_logits(timeline):
    """Compute the loss some tokens at a time."""
    kinds, by_step = Kinds(timeline), defaultdict(list)
    if not kinds.widths:
        return "no log_softmax ran: the loss is no cross entropy"
    models = timeline.recording.models
    if all(model.no_head for model in models):
        return next(model.no_head for model in models)
    if not any(record.op == "_log_softmax" and record.module and len(record.shape) > 1 for record in timeline.records):
        return "the script takes the logits and computes its loss itself: give the model its labels, or call " \
               "chunked_linear_cross_entropy on hidden states"
    for i in timeline.where("activations", "temporaries"):
        if kinds[i] in OF_LOSS:
            by_step[_loss_of(timeline, i)].append(i)
    spans = [span for loss, records in by_step.items() if loss is not None
             for span in _without(timeline, loss, records)]
    return Found(spans) if spans else "no rows of logits are in memory"


def _loss_of(timeline, i):
    """The log_softmax that a record of logits or of their gradients belongs to: the nearest before a gradient, the
    nearest after logits."""
    losses = [j for j in timeline.where("activations", "temporaries") if timeline.records[j].op == "_log_softmax"]
    born = timeline.born
    if timeline.records[i].phase == BACKWARD:
        return max((j for j in losses if born[j] <= born[i]), key=lambda j: born[j], default=None)
    return min((j for j in losses if born[j] >= born[i]), key=lambda j: born[j], default=None)


def _without(timeline, loss, records):
    """Take a loss's rows of logits away, and put in the bytes of the chunked loss."""
    record = timeline.records[loss]
    N, V = int(timeline.nbytes[loss]) // 4 // record.shape[-1], record.shape[-1]
    C, bias = _head(timeline, V, records)
    if C is None:
        return []
    form = chunked_cross_entropy_bytes(N, V, C, torch.float32, bias=bias, weight_needs=_trained(timeline, V, C))
    backward = [timeline.born[i] for i in records if timeline.records[i].phase == BACKWARD]
    first, kept = int(min(timeline.born[i] for i in records)), int(timeline.born[loss]) + 2
    last = int(max(backward, default=timeline.freed[loss]))
    while_there = [(first, kept), *((timeline.born[i], timeline.freed[i]) for i in records
                                    if timeline.records[i].phase == BACKWARD)]
    workspaces = [i for i in timeline.where(WORKSPACE)
                  if any(begin <= timeline.born[i] <= end for begin, end in while_there)]
    return [*map(timeline.whole, records + workspaces), (first, kept, form.forward), (kept, last, form.saved),
            (last, last + 2, form.backward - form.saved)]


def _head(timeline, V, records):
    """(width of the hidden states, whether there is a bias) of the head that makes V numbers a row."""
    for model in timeline.recording.models:
        if V in model.heads:
            C, bias, _ = model.heads[V]
            return C, bias
        shapes = [shape for shape in model.shapes if len(shape) == 2 and shape[0] == V]
        if shapes:  # a tied table, or a head that is no nn.Linear
            return shapes[0][1], False
    return None, False


def _trained(timeline, V, C):
    return any(r.phase == BACKWARD and tuple(r.shape) in ((V, C), (C, V)) for r in timeline.records)
