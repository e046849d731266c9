"""Saved tensors in fewer bytes, or on the host, from their forward to their backward (`refimpl.activations`)."""

from functools import partial

from ...activations.codecs import cast_bytes, group_bytes, mask_bytes
from ...activations.compress import SMALLEST
from ...ground.ledger import ACTIVATIONS
from ...memory.records import FORWARD
from .found import RETAINED, Found

FORWARD_USE, BACKWARD_USE = 3, 3  # operations that use the tensor itself
GROUP = 128
WIDE = ("float32", "float64")
FLOATS = (*WIDE, "bfloat16", "float16")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


def saved(replay):
    """List the records that autograd saved in forward, and freed in backward: large ones, no parameters."""
    return [i for i in replay.where(ACTIVATIONS, phase=FORWARD)
            if replay.records[i].saved and replay.records[i].freed_by_backward and replay.nbytes[i] >= SMALLEST]


def compressed(method, replay):
    """Compress by one of the methods of `compress_activations`."""
    spans = [span for i in saved(replay) if (after := _packed_bytes(method, replay, i)) < replay.nbytes[i]
             for span in _spans(replay, i, after)]
    if not spans and replay.retained:
        return RETAINED
    if not spans:
        return "no mask is saved" if method == "lossless" else "nothing of a wider type that wants a gradient is saved"
    return Found(spans, "what has inf, NaN or logarithms far apart stays whole" if method == "int8" else "")


lossless, bf16, int8 = (partial(compressed, method) for method in ("lossless", "bf16", "int8"))


def on_the_host(replay):
    """Keep what is saved in host memory (`offload_activations`), where the device has a memory of its own."""
    spans = [span for i in saved(replay) if replay.nbytes[i] >= 2**20 for span in _spans(replay, i, 0)]
    if not spans:
        return RETAINED if replay.retained else "no saved tensor has 1 MiB"
    return Found(spans, "copies on their way are on the device; on a CPU nothing is saved")


def _spans(replay, i, after):
    first, last = int(replay.born[i]) + FORWARD_USE, int(replay.freed[i]) - BACKWARD_USE
    return [(first, last, after - int(replay.nbytes[i])), (last, int(replay.freed[i]), after)]  # at last both are there


def _packed_bytes(method, replay, i):
    record, nbytes = replay.records[i], int(replay.nbytes[i])
    size = SIZES.get(record.dtype, nbytes + 1)
    n, one_a_row = nbytes // size, not record.shape or record.shape[-1] == 1
    if record.dtype == "bool" or _is_noise(replay, record):
        return mask_bytes(n, size)
    if i not in replay.recording.wanting or one_a_row:
        return nbytes
    if method == "bf16" and record.dtype in WIDE:
        return cast_bytes(n)
    return group_bytes(n, GROUP) if method == "int8" and record.dtype in FLOATS else nbytes


def _is_noise(replay, record):
    """Whether the record is dropout's noise on a CPU: two values, in the type of the input."""
    following = replay.trace.ops[record.born + 1 : record.born + 2]
    return record.op == "empty_like" and bool(following) and following[0].name == "bernoulli_"
