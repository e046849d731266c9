"""Saved tensors in fewer bytes, or on the host, from their forward to their backward (`refimpl.activations`)."""

from functools import partial

from ...activations.codecs import cast_bytes, group_bytes, mask_bytes
from ...activations.compress import SMALLEST
from ...common.ledger import ACTIVATIONS
from ...memory.storage_records import BACKWARD, FORWARD
from .found import RETAINED, Found

USED = 3  # operations that use the tensor itself, when it is saved and when it is wanted
NEARLY = 0.97  # a saving that is as near to its bound is no bound
GROUP = 128
WIDE = ("float32", "float64")
FLOATS = (*WIDE, "bfloat16", "float16")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


def saved(timeline):
    """List the records that autograd saved in forward, and freed in backward: large ones, no parameters."""
    return [i for i in timeline.where(ACTIVATIONS, phase=FORWARD)
            if timeline.records[i].saved and timeline.records[i].freed_by_backward and timeline.nbytes[i] >= SMALLEST]


def saved_again(timeline):
    """List those that a recomputation makes in backward."""
    return [i for i in timeline.where(ACTIVATIONS, phase=BACKWARD) if timeline.nbytes[i] >= SMALLEST]


def compressed(method, timeline):
    """Compress by one of the methods of `compress_activations`."""
    again = saved_again(timeline)
    sizes = {i: after for i in saved(timeline) + again
             if (after := _packed_bytes(method, timeline, i)) < timeline.nbytes[i]}
    if not sizes and timeline.retained:
        return RETAINED
    if not sizes:
        return "no mask is saved" if method == "lossless" else "nothing of a wider type that wants a gradient is saved"

    def spans(used, held):
        """What packing changes: `used` operations use a tensor itself, first and last, and variables until `held`."""
        return [span for i, after in sizes.items() for span in _spans(timeline, i, after, used, held(i))]

    noise = {i for i in sizes if _is_noise(timeline, timeline.records[i])}  # in no variable
    surely = timeline.saved(spans(USED, lambda i: 0 if i in noise else timeline.block_end(i)))
    likely, at_most = spans(USED, lambda i: 0), spans(1, lambda i: 0)
    saves, most = timeline.saved(likely), timeline.saved(at_most)
    if method == "int8":
        loose = bool(again) or 1.3 * surely < most
        return Found(at_most, "what has inf, NaN or logarithms far apart stays whole", loose)
    if again:
        return Found(at_most, "blocks that are recomputed hold what they make again beside what is packed", True)
    if surely < NEARLY * saves or saves < NEARLY * most:
        return Found(at_most, "what a module's variables hold is there beside what is packed, until it returns",
                     1.3 * surely < most)
    return Found(likely)


lossless, bf16, int8 = (partial(compressed, method) for method in ("lossless", "bf16", "int8"))


def on_the_host(timeline):
    """Keep what is saved in host memory (`offload_activations`), where the device has a memory of its own."""
    spans = [span for i in saved(timeline) if timeline.nbytes[i] >= 2**20 for span in _spans(timeline, i, 0)]
    if not spans:
        return RETAINED if timeline.retained else "no saved tensor has 1 MiB"
    return Found(spans, "copies on their way are on the device; on a CPU nothing is saved", True)


def _spans(timeline, i, after, used=USED, held=0):
    first, last = max(int(timeline.born[i]) + used, held), int(timeline.freed[i]) - used
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
