"""What the rows of EFFECTS name: storages, their rows, why a technique saves nothing, and rules that are no row."""

from ...common.ledger import ACTIVATIONS, GRADIENTS, INPUTS, TEMPORARIES
from ..kinds import COPIES, KEPT, UPDATE, Kinds
from .found import Found

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
NO_SEQUENCE = "no model ran"


def between_steps(timeline, i):
    """Return the rows from each step's end until the next backward, of a gradient that the next forward begins with."""
    spans = []
    for step, (_, end) in enumerate(timeline.steps[:-1]):
        begins = next((row for row in timeline.forwards if row >= end), timeline.rows)
        until = next((row for row in timeline.backwards if row >= end), timeline.steps[step + 1][1])
        if timeline.born[i] < end and timeline.freed[i] > begins:
            spans.append((end, min(until, int(timeline.freed[i]))))
    return spans


def saved_for_no_backward(timeline):
    """List what forwards save whose loss is never differentiated."""
    found = []
    for call in timeline.recording.calls:
        saved = [i for i in timeline.made_in(call) if call.depth == 1 and timeline.records[i].saved]
        if not call.goes_back and not any(timeline.records[i].freed_by_backward for i in saved):
            found += saved
    return found


def no_sequence(timeline):
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
        if record.dtype == "float32" and kinds[i] not in (UPDATE, KEPT):
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
