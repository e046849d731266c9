"""What rows of EFFECTS name: storages, when they are not there, and why a technique saves nothing."""

from ...common.ledger import ACTIVATIONS, INPUTS, TEMPORARIES
from ..kinds import COPIES, KEPT, UPDATE

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
NO_SEQUENCE = "no model ran"


def between_steps(timeline, records):
    """From each step's end until the next backward, where the next forward begins with a gradient."""
    found = []
    for step, (_, end) in enumerate(timeline.steps[:-1]):
        begins = next((row for row in timeline.forwards if row >= end), timeline.rows)
        until = next((row for row in timeline.backwards if row >= end), timeline.steps[step + 1][1])
        found += [(i, end, min(until, int(timeline.freed[i]))) for i in records
                  if timeline.born[i] < end and timeline.freed[i] > begins]
    return found


def saved_for_no_backward(timeline):
    """List what forwards save whose loss is never differentiated."""
    found = []
    for call in timeline.recording.calls:
        saved = [i for i in timeline.made_in(call) if call.depth == 1 and timeline.records[i].saved]
        if not call.goes_back and not any(timeline.records[i].freed_by_backward for i in saved):
            found += saved
    return found


def no_sequence(timeline):
    """Return why sequences cannot be cut; "" if a model that ran is causal, and takes a part of one."""
    models = timeline.recording.models
    if any(not (model.no_head or model.no_sequence) for model in models):
        return ""
    return next((model.no_head or model.no_sequence for model in models), NO_SEQUENCE)


def in_32_bits(timeline):
    """List what products and what follows have in 32 bits, saved inputs, of which there is a copy in 16 bits then, and
    what an LSTM keeps for itself: another kernel runs then."""
    kinds, inputs = timeline.kinds, [i for i in timeline.where(INPUTS) if timeline.records[i].saved]
    return [i for i in timeline.where(ACTIVATIONS, TEMPORARIES) + inputs
            if (timeline.records[i].dtype == "float32" and kinds[i] not in (UPDATE, KEPT))
            or timeline.records[i].op.startswith("mkldnn_rnn")]


def in_16_bits(timeline, records):
    """Leave the half, but nothing of second copies of gradients, and of what only an LSTM's kernel keeps."""
    kinds = timeline.kinds
    return [0 if timeline.records[i].dtype != "float32" or kinds[i] in (UPDATE, KEPT, COPIES)
            else int(timeline.nbytes[i]) // 2 for i in records]


def has_16_bits(timeline):
    """Say that products are in 16 bits."""
    run = any(timeline.records[i].dtype in ("bfloat16", "float16") and timeline.records[i].op in PRODUCTS
              for i in timeline.where(ACTIVATIONS))
    return "matrix products run in 16 bits already" if run else ""


def fragments(timeline):
    """Take back what an allocator on CUDA reserves and has not allocated."""
    cuda = timeline.recording.cuda
    is_there = cuda and timeline.trace.device.startswith("cuda")
    return [(0, timeline.rows, cuda["allocated"] - cuda["reserved"])] if is_there else []
