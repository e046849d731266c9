"""Gradients, parameters and optimizer state: dropped earlier, cut among ranks, or kept elsewhere."""

from ...common.ledger import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES
from ...memory.tracking.taking import WORKSPACE
from ..kinds import BEFORE, CASTS, COPIES, OF_SCORES, UPDATE, Kinds
from .batches import most_rows
from .found import Found

RANKS = 8
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
NO_SEQUENCE = "no model ran"


def set_to_none(timeline):
    """Drop gradients after each step: `zero_grad()` as it is by default, before the next forward, not after it."""
    spans = []
    for step, (_, end) in enumerate(timeline.steps[:-1]):
        begins = next((row for row in timeline.forwards if row >= end), timeline.rows)
        until = next((row for row in timeline.backwards if row >= end), timeline.steps[step + 1][1])
        spans += [(end, min(until, int(timeline.freed[i])), -timeline.nbytes[i]) for i in timeline.where(GRADIENTS)
                  if timeline.born[i] < end and timeline.freed[i] > begins]
    return Found(spans, "in backward they come back one after the other") if spans else (
        "gradients are None already while the forward runs")


def without_graph(timeline):
    """Run forwards whose loss is never differentiated under `torch.no_grad()`."""
    spans = []
    for call in timeline.recording.calls:
        saved = [i for i in timeline.made_in(call) if call.depth == 1 and timeline.records[i].saved]
        if not call.goes_back and not any(timeline.records[i].freed_by_backward for i in saved):
            spans += [timeline.whole(i) for i in saved]
    return Found(spans, "what the program itself keeps stays") if spans else "every forward here has its backward"


def _scaled(categories, timeline, ranks=RANKS, bound="buckets, and what is whole for a moment, come on top",
            temporaries=lambda kind: kind == UPDATE, gone=(UPDATE,), loose=True):
    """Leave 1/`ranks` of what is in `categories`, and of the temporaries of the kinds that go with it: a bound has to
    count all that can be cut. Of the kinds `gone` nothing is left: an update may go bucket by bucket."""
    spans, kinds = [], Kinds(timeline)
    for i in timeline.where(*categories, TEMPORARIES, WORKSPACE):
        if timeline.categories[i] in categories or temporaries(kinds[i]):
            first, after, nbytes = timeline.whole(i)
            spans.append((first, after, nbytes if kinds[i] in gone else nbytes * (ranks - 1) // ranks))
    return Found(spans, bound, loose) if timeline.where(*categories) else (
        f"there is nothing of {' or '.join(categories)}")


def _of_the_batch(kind):
    """Whether temporaries of a kind are as large as the batch, not as the weights."""
    return kind not in (UPDATE, BEFORE, COPIES, CASTS)


def _of_the_model(kind):
    """Whether temporaries of a kind are a layer's, or its update's."""
    return kind != BEFORE


def zero1(timeline):
    """Cut optimizer state among ranks, and with it the update."""
    return _scaled([OPTIMIZER_STATE], timeline)


def zero2(timeline):
    """Cut gradients, too."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS], timeline)


def zero3(timeline):
    """Cut parameters, too."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS], timeline)


def on_the_host(timeline):
    """Keep gradients and optimizer state in host memory, or on a disk, and update there."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS], timeline, 10**9,
                   "where the device has a memory of its own; a bucket is there in turn")


def split_layers(timeline):
    """Cut every layer's weights, and its states, among ranks."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS], timeline, RANKS,
                   "norms, and activations between the layers, stay whole", _of_the_model)


def split_model(timeline):
    """Give each rank some of the layers, and the batch in as many micro-batches as there are ranks."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS], timeline, RANKS,
                   "ranks with the embedding or the head hold more; the first keeps as many micro-batches as there are "
                   "ranks", _of_the_model)


def split_sequence(timeline):
    """Give each rank a part of every sequence: attention is in tiles then."""
    if why := _no_sequence(timeline):
        return why
    return _scaled([ACTIVATIONS, INPUTS], timeline, RANKS, "keys and values of others pass by", _of_the_batch,
                   OF_SCORES)


def fewer_rows(timeline):
    """Give each rank a part of the batch."""
    if most_rows(timeline) == 1:
        return "the batch has one row"
    return _scaled([ACTIVATIONS, INPUTS], timeline, RANKS, "gradients on their way are in buckets", _of_the_batch)


def in_chunks(timeline):
    """Run a long sequence in chunks, with the whole gradient."""
    if why := _no_sequence(timeline):
        return why
    return _scaled([ACTIVATIONS], timeline, RANKS, "keys, values and their gradients stay for all chunks",
                   _of_the_batch, OF_SCORES)


def _no_sequence(timeline):
    """Return why sequences cannot be cut; None if a model that ran is causal, and takes a part of one."""
    models = timeline.recording.models
    if any(not (model.no_head or model.no_sequence) for model in models):
        return None
    return next((model.no_head or model.no_sequence for model in models), NO_SEQUENCE)


def half_precision(timeline):
    """Run matrix products and what follows in 16 bits, under autocast."""
    spans, kinds = [], Kinds(timeline)
    saved_inputs = [i for i in timeline.where(INPUTS) if timeline.records[i].saved]  # then a 16-bit copy is
    for i in timeline.where(ACTIVATIONS, TEMPORARIES) + saved_inputs:
        record = timeline.records[i]
        if record.dtype in ("bfloat16", "float16") and record.op in PRODUCTS and timeline.categories[i] == ACTIVATIONS:
            return "matrix products run in 16 bits already"
        if record.dtype == "float32" and kinds[i] not in (UPDATE, BEFORE):
            first, after, nbytes = timeline.whole(i)
            spans.append((first, after, nbytes if kinds[i] == COPIES else nbytes // 2))
        elif record.op.startswith("mkldnn_rnn"):  # what an LSTM keeps for itself: in 16 bits another kernel runs
            spans.append(timeline.whole(i))
    if not spans:
        return "no activation has 32 bits"
    spans += map(timeline.whole, timeline.where(GRADIENTS))  # the peak may be where fewer of them are there, or copies
    return Found(spans, "norms, most losses and what they read stay in 32 bits, and weights are cast", True)


def fragments(timeline):
    """Take back what is reserved and not allocated."""
    cuda = timeline.recording.cuda
    if not cuda or not timeline.trace.device.startswith("cuda"):
        return "a CPU's allocator reserves nothing; on CUDA the difference of reserved and allocated is said here"
    free = cuda["reserved"] - cuda["allocated"]
    return Found([(0, timeline.rows, -free)], "of what is reserved, not of the tensors")


def on_the_wire(timeline):
    """Send gradients compressed."""
    return "it saves bytes on the wire, none in memory"
