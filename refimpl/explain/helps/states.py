"""Gradients, parameters and optimizer state: dropped earlier, cut among ranks, or kept elsewhere."""

from ...ground.ledger import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES
from ..kinds import BEFORE, CASTS, COPIES, LOG_PROBABILITIES, LOSS, OF_SCORES, UPDATE, Kinds
from .batches import most_rows
from .found import Found

RANKS = 8
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
NO_SEQUENCE = "no model here reads sequences"


def set_to_none(replay):
    """Drop gradients after each step: `zero_grad()` as it is by default, before the next forward, not after it."""
    spans = []
    for step, (_, end) in enumerate(replay.steps[:-1]):
        begins = next((row for row in replay.forwards if row >= end), replay.rows)
        until = next((row for row in replay.backwards if row >= end), replay.steps[step + 1][1])
        spans += [(end, min(until, int(replay.freed[i])), -replay.nbytes[i]) for i in replay.where(GRADIENTS)
                  if replay.born[i] < end and replay.freed[i] > begins]
    return Found(spans, "in backward they come back one after the other") if spans else (
        "gradients are None already while the forward runs")


def without_graph(replay):
    """Run forwards whose loss is never differentiated under `torch.no_grad()`."""
    spans = []
    for call in replay.recording.calls:
        saved = [i for i in replay.made_in(call) if call.depth == 1 and replay.records[i].saved]
        if not call.goes_back and not any(replay.records[i].freed_by_backward for i in saved):
            spans += [replay.whole(i) for i in saved]
    return Found(spans, "what the program itself keeps stays") if spans else "every forward here has its backward"


def _scaled(categories, replay, ranks=RANKS, bound="buckets, and what is whole for a moment, come on top",
            temporaries=lambda kind: kind == UPDATE, gone=(UPDATE,)):
    """Leave 1/`ranks` of what is in `categories`, and of the temporaries of the kinds that go with it: a bound has to
    count all that can be cut. Of the kinds `gone` nothing is left: an update may go bucket by bucket."""
    spans, kinds = [], Kinds(replay)
    for i in replay.where(*categories, TEMPORARIES):
        if replay.categories[i] in categories or temporaries(kinds[i]):
            first, after, nbytes = replay.whole(i)
            spans.append((first, after, nbytes if kinds[i] in gone else nbytes * (ranks - 1) // ranks))
    return Found(spans, bound) if replay.where(*categories) else (
        f"there is nothing of {' or '.join(categories)}")


def _of_the_batch(kind):
    """Whether temporaries of a kind are as large as the batch, not as the weights."""
    return kind not in (UPDATE, BEFORE, COPIES, CASTS)


def _of_the_model(kind):
    """Whether temporaries of a kind are a layer's, or its update's."""
    return kind != BEFORE


def zero1(replay):
    """Cut optimizer state among ranks, and with it the update."""
    return _scaled([OPTIMIZER_STATE], replay)


def zero2(replay):
    """Cut gradients, too."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS], replay)


def zero3(replay):
    """Cut parameters, too."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS], replay)


def on_the_host(replay):
    """Keep gradients and optimizer state in host memory, or on a disk, and update there."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS], replay, 10**9, "where the device has a memory of its own; a bucket is "
                   "there in turn")


def split_layers(replay):
    """Cut every layer's weights, and its states, among ranks."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS], replay, RANKS,
                   "norms, and activations between the layers, stay whole", _of_the_model)


def split_model(replay):
    """Give each rank some of the layers, and the batch in as many micro-batches as there are ranks."""
    return _scaled([OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS], replay, RANKS,
                   "ranks with the embedding or the head hold more; the first keeps as many micro-batches as there are "
                   "ranks", _of_the_model)


def split_sequence(replay):
    """Give each rank a part of every sequence: attention is in tiles then."""
    if not _ran(replay, "embedding", "softmax", "scaled_dot_product"):
        return NO_SEQUENCE
    return _scaled([ACTIVATIONS, INPUTS], replay, RANKS, "keys and values of others pass by", _of_the_batch,
                   OF_SCORES)


def fewer_rows(replay):
    """Give each rank a part of the batch."""
    if most_rows(replay) == 1:
        return "the batch has one row"
    return _scaled([ACTIVATIONS, INPUTS], replay, RANKS, "gradients on their way are in buckets", _of_the_batch)


def in_chunks(replay):
    """Run a long sequence in chunks, with the whole gradient."""
    if not _ran(replay, "embedding"):
        return NO_SEQUENCE
    return _scaled([ACTIVATIONS], replay, RANKS, "keys, values and their gradients stay for all chunks", _of_the_batch,
                   OF_SCORES)


def _ran(replay, *names):
    """Whether an operation ran in a model whose name has one of `names` in it: not `_log_softmax`, a loss's."""
    return any(name in op.name and op.name != "_log_softmax" for op in replay.trace.ops for name in names if op.module)


def half_precision(replay):
    """Run matrix products and what follows in 16 bits, under autocast."""
    spans, kinds = [], Kinds(replay)
    for i in replay.where(ACTIVATIONS, TEMPORARIES):
        record = replay.records[i]
        if record.dtype in ("bfloat16", "float16") and record.op in PRODUCTS and replay.categories[i] == ACTIVATIONS:
            return "matrix products run in 16 bits already"
        if record.dtype == "float32" and kinds[i] not in (LOG_PROBABILITIES, LOSS, UPDATE, BEFORE):
            first, after, nbytes = replay.whole(i)
            spans.append((first, after, nbytes // 2))
    return Found(spans, "norms, the loss and what they read stay in 32 bits, and weights are cast") if spans else (
        "no activation has 32 bits")


def fragments(replay):
    """Take back what is reserved and not allocated."""
    cuda = replay.recording.cuda
    if not cuda or not replay.trace.device.startswith("cuda"):
        return "a CPU's allocator reserves nothing; on CUDA the difference of reserved and allocated is said here"
    free = cuda["reserved"] - cuda["allocated"]
    return Found([(0, replay.rows, -free)], "of what is reserved, not of the tensors")


def on_the_wire(replay):
    """Send gradients compressed."""
    return "it saves bytes on the wire, none in memory"
