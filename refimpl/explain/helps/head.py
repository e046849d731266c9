"""The loss without logits (`refimpl.cross_entropy`): rows of the vocabulary's width leave the recording."""

from collections import defaultdict

import torch

from ...cross_entropy import chunked_cross_entropy_bytes
from ...memory.storage_records import BACKWARD
from ...memory.tracking.taking import WORKSPACE
from ..kinds import OF_LOSS


def no_loss(timeline):
    """Say why no loss can do without logits."""
    if not timeline.kinds.widths:
        return "no log_softmax ran: the loss is no cross entropy"
    models = timeline.recording.models
    if all(model.no_head for model in models):
        return next(model.no_head for model in models)
    if not any(record.op == "_log_softmax" and record.module and len(record.shape) > 1 for record in timeline.records):
        return "the script takes the logits and computes its loss itself: give the model its labels, or call " \
               "chunked_linear_cross_entropy on hidden states"
    return ""


def all_tokens(timeline):
    """List the records of logits and of their gradients, and the workspaces of what makes them."""
    return [i for gone, _ in _losses(timeline) for i in gone]


def some_tokens(timeline):
    """List the spans of the chunked loss: a chunk in forward, what it saves, a chunk in backward."""
    return [span for _, put in _losses(timeline) for span in put]


def _losses(timeline):
    """For each loss list what goes and what is put in its place."""
    kinds, by_loss = timeline.kinds, defaultdict(list)
    computed = timeline.where("activations", "temporaries")
    losses = [i for i in computed if timeline.records[i].op == "_log_softmax"]
    for i in computed:
        if kinds[i] in OF_LOSS:
            by_loss[_loss_of(timeline, i, losses)].append(i)
    return [_chunked(timeline, loss, records) for loss, records in by_loss.items() if loss is not None]


def _loss_of(timeline, i, losses):
    """The log_softmax that a record belongs to: the nearest before a gradient, the nearest after logits."""
    born = timeline.born
    if timeline.records[i].phase == BACKWARD:
        return max((j for j in losses if born[j] <= born[i]), key=lambda j: born[j], default=None)
    return min((j for j in losses if born[j] >= born[i]), key=lambda j: born[j], default=None)


def _chunked(timeline, loss, records):
    """Return the records of a loss, with workspaces, and the spans of the chunked loss."""
    V, born = timeline.records[loss].shape[-1], timeline.born
    N, (C, bias) = int(timeline.nbytes[loss]) // 4 // V, _head(timeline, V)
    if C is None:
        return [], []
    trained = any(r.phase == BACKWARD and tuple(r.shape) in ((V, C), (C, V)) for r in timeline.records)
    form = chunked_cross_entropy_bytes(N, V, C, torch.float32, bias=bias, weight_needs=trained)
    backward = [i for i in records if timeline.records[i].phase == BACKWARD]
    first, saved = int(born[records].min()), int(born[loss]) + 2
    last = int(max(born[backward], default=timeline.freed[loss]))
    while_there = [(first, saved), *((born[i], timeline.freed[i]) for i in backward)]
    workspaces = [i for i in timeline.where(WORKSPACE) if any(begin <= born[i] <= end for begin, end in while_there)]
    return records + workspaces, [(first, saved, form.forward), (saved, last, form.saved),
                                  (last, last + 2, form.backward - form.saved)]


def _head(timeline, V):
    """(width of the hidden states, whether there is a bias) of the head that makes V numbers a row."""
    for model in timeline.recording.models:
        if V in model.heads:
            C, bias, _ = model.heads[V]
            return C, bias
        shapes = [shape for shape in model.shapes if len(shape) == 2 and shape[0] == V]
        if shapes:  # a tied table, or a head that is no nn.Linear
            return shapes[0][1], False
    return None, False
