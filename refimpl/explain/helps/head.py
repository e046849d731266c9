"""The loss without logits (`refimpl.cross_entropy`): rows of the vocabulary's width leave the recording."""

from collections import defaultdict

import torch

from ...cross_entropy import chunked_cross_entropy_bytes
from ...memory.records import BACKWARD
from ..kinds import OF_LOSS, Kinds
from .found import Found


def without_logits(replay):
    """Compute the loss some tokens at a time."""
    kinds, by_step = Kinds(replay), defaultdict(list)
    if not kinds.widths:
        return "no log_softmax ran: the loss is no cross entropy"
    for i in replay.where("activations", "temporaries"):
        if kinds[i] in OF_LOSS:
            by_step[_loss_of(replay, i)].append(i)
    spans = [span for loss, records in by_step.items() if loss is not None for span in _without(replay, loss, records)]
    return Found(spans) if spans else "no rows of logits are in memory"


def _loss_of(replay, i):
    """The log_softmax that a record of logits or of their gradients belongs to: the nearest before a gradient, the
    nearest after logits."""
    losses = [j for j in replay.where("activations", "temporaries") if replay.records[j].op == "_log_softmax"]
    if replay.records[i].phase == BACKWARD:
        return max((j for j in losses if replay.born[j] <= replay.born[i]), key=lambda j: replay.born[j], default=None)
    return min((j for j in losses if replay.born[j] >= replay.born[i]), key=lambda j: replay.born[j], default=None)


def _without(replay, loss, records):
    """Take a loss's rows of logits away, and put in the bytes of the chunked loss."""
    record = replay.records[loss]
    N, V = int(replay.nbytes[loss]) // 4 // record.shape[-1], record.shape[-1]
    C, bias = _head(replay, V, records)
    if C is None:
        return []
    form = chunked_cross_entropy_bytes(N, V, C, torch.float32, bias=bias, weight_needs=_trained(replay, V, C))
    backward = [replay.born[i] for i in records if replay.records[i].phase == BACKWARD]
    first, kept = int(min(replay.born[i] for i in records)), int(replay.born[loss]) + 2
    last = int(max(backward, default=replay.freed[loss]))
    return [*(replay.whole(i) for i in records), (first, kept, form.forward), (kept, last, form.saved),
            (last, last + 2, form.backward - form.saved)]


def _head(replay, V, records):
    """(width of the hidden states, whether there is a bias) of the head that makes V numbers a row."""
    for model in replay.recording.models:
        if V in model.heads:
            C, bias, _ = model.heads[V]
            return C, bias
        shapes = [shape for shape in model.shapes if len(shape) == 2 and shape[0] == V]
        if shapes:  # a tied table, or a head that is no nn.Linear
            return shapes[0][1], False
    return None, False


def _trained(replay, V, C):
    return any(r.phase == BACKWARD and tuple(r.shape) in ((V, C), (C, V)) for r in replay.records)
