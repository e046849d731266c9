"""Saved tensors in fewer bytes, or on the host, from their forward to their backward (`refimpl.activations`)."""

from functools import partial

from ...activations.codecs import cast_bytes, group_bytes, mask_bytes
from ...activations.compress import SMALLEST
from ...common.ledger import ACTIVATIONS
from ...memory.storage_records import BACKWARD, FORWARD

USED = 3  # operations that use the tensor itself, when it is saved and when it is wanted
GROUP = 128
WIDE = ("float32", "float64")
FLOATS = (*WIDE, "bfloat16", "float16")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


def tensors(timeline):
    """List what autograd saves: in forward, and where a recomputation does."""
    return in_forward(timeline) + again(timeline)


def in_forward(timeline):
    """List the records that autograd saved in forward, and freed in backward: large ones, no parameters."""
    return [i for i in timeline.where(ACTIVATIONS, phase=FORWARD)
            if timeline.records[i].saved and timeline.records[i].freed_by_backward and timeline.nbytes[i] >= SMALLEST]


def again(timeline):
    """List those that a recomputation makes in backward."""
    return [i for i in timeline.where(ACTIVATIONS, phase=BACKWARD) if timeline.nbytes[i] >= SMALLEST]


def of_a_mib(timeline):
    """List those of forward that have 1 MiB."""
    return [i for i in in_forward(timeline) if timeline.nbytes[i] >= 2**20]


def blocks_again(timeline):
    """Say why the bytes are a bound where blocks are recomputed."""
    return "blocks that are recomputed hold what they make again beside what is packed" if again(timeline) else ""


def while_unused(timeline, records, used=USED):
    """From the last operation that uses it in forward until the first in backward."""
    return [(i, int(timeline.born[i]) + used, int(timeline.freed[i]) - used) for i in records]


at_once = partial(while_unused, used=1)


def once_returned(timeline, records):
    """From where the block that made it has returned, too; noise is in no variable."""
    return [(i, first if _is_noise(timeline, i) else max(first, timeline.block_end(i)), after)
            for i, first, after in while_unused(timeline, records)]


def in_fewer(method, timeline, records):
    """List the bytes of each by one of the methods of `compress_activations`."""
    return [_packed_bytes(method, timeline, i) for i in records]


lossless, bf16, int8 = (partial(in_fewer, method) for method in ("lossless", "bf16", "int8"))


def _packed_bytes(method, timeline, i):
    record, nbytes = timeline.records[i], int(timeline.nbytes[i])
    size = SIZES.get(record.dtype, nbytes + 1)
    n, one_a_row = nbytes // size, not record.shape or record.shape[-1] == 1
    if record.dtype == "bool" or _is_noise(timeline, i):
        return mask_bytes(n, size)
    if i not in timeline.recording.wanting or one_a_row:
        return nbytes
    if method == "bf16" and record.dtype in WIDE:
        return cast_bytes(n)
    return group_bytes(n, GROUP) if method == "int8" and record.dtype in FLOATS else nbytes


def _is_noise(timeline, i):
    """Whether the record is dropout's noise on a CPU: two values, in the type of the input."""
    record = timeline.records[i]
    following = timeline.trace.ops[record.born + 1 : record.born + 2]
    return record.op == "empty_like" and bool(following) and following[0].name == "bernoulli_"
