"""Saved tensors in fewer bytes, or on the host, from their forward to their backward (`refimpl.activations`)."""

from functools import partial

from ...activations.codecs import cast_bytes, group_bytes, mask_bytes
from ...activations.compress import SMALLEST
from ...common.ledger import ACTIVATIONS
from ...memory.storage_records import FORWARD
from .found import RETAINED, Found

FORWARD_USE, BACKWARD_USE = 3, 3  # operations that use the tensor itself
GROUP = 128
WIDE = ("float32", "float64")
FLOATS = (*WIDE, "bfloat16", "float16")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


def saved(timeline):
    """List the records that autograd saved in forward, and freed in backward: large ones, no parameters."""
    return [i for i in timeline.where(ACTIVATIONS, phase=FORWARD)
            if timeline.records[i].saved and timeline.records[i].freed_by_backward and timeline.nbytes[i] >= SMALLEST]


def compressed(method, timeline):
    """Compress by one of the methods of `compress_activations`."""
    spans = [span for i in saved(timeline) if (after := _packed_bytes(method, timeline, i)) < timeline.nbytes[i]
             for span in _spans(timeline, i, after)]
    if not spans and timeline.retained:
        return RETAINED
    if not spans:
        return "no mask is saved" if method == "lossless" else "nothing of a wider type that wants a gradient is saved"
    return Found(spans, "what has inf, NaN or logarithms far apart stays whole" if method == "int8" else "")


lossless, bf16, int8 = (partial(compressed, method) for method in ("lossless", "bf16", "int8"))


def on_the_host(timeline):
    """Keep what is saved in host memory (`offload_activations`), where the device has a memory of its own."""
    spans = [span for i in saved(timeline) if timeline.nbytes[i] >= 2**20 for span in _spans(timeline, i, 0)]
    if not spans:
        return RETAINED if timeline.retained else "no saved tensor has 1 MiB"
    return Found(spans, "copies on their way are on the device; on a CPU nothing is saved")


def _spans(timeline, i, after):
    first, last = int(timeline.born[i]) + FORWARD_USE, int(timeline.freed[i]) - BACKWARD_USE
    packed = first, last, after - int(timeline.nbytes[i])
    return [packed, (last, int(timeline.freed[i]), after)]  # at last both are there


def _packed_bytes(method, timeline, i):
    record, nbytes = timeline.records[i], int(timeline.nbytes[i])
    size = SIZES.get(record.dtype, nbytes + 1)
    n, one_a_row = nbytes // size, not record.shape or record.shape[-1] == 1
    if record.dtype == "bool" or _is_noise(timeline, record):
        return mask_bytes(n, size)
    if i not in timeline.recording.wanting or one_a_row:
        return nbytes
    if method == "bf16" and record.dtype in WIDE:
        return cast_bytes(n)
    return group_bytes(n, GROUP) if method == "int8" and record.dtype in FLOATS else nbytes


def _is_noise(timeline, record):
    """Whether the record is dropout's noise on a CPU: two values, in the type of the input."""
    following = timeline.trace.ops[record.born + 1 : record.born + 2]
    return record.op == "empty_like" and bool(following) and following[0].name == "bernoulli_"
