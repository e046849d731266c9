"""Which tensors the backends can reduce and move, and how."""

import torch
import torch.distributed as dist

from ...common.marks import mark

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
       "product": dist.ReduceOp.PRODUCT}
BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # on bytes 0 and 1: any, any, all, all
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMED = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)  # dtypes that both gloo and NCCL know


def reduction(op, x):
    """Return torch's name of `op`. ValueError if x cannot be reduced by it."""
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op={op!r}: expected one of {', '.join(OPS)}")
    if op == "avg" and x.dtype not in FLOATS:
        raise ValueError(f"op='avg' of {x.dtype}: only float32, float64, float16 and bfloat16 have an average")
    if x.dtype is torch.bool:
        return OPS[BOOL_OPS[op]]
    if x.dtype not in NAMED:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMED)
        raise ValueError(f"{x.dtype} cannot be reduced: expected one of {known} or bool")
    return OPS[op]


def as_bytes(tensor):
    """Return the tensor, or a view of its bytes if the backends do not know its dtype."""
    if tensor.dtype in NAMED:
        return tensor
    # as_strided: a contiguous tensor with fewer than two elements may have any stride, but `view` needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_memory(a, b):
    """Tell whether two tensors of one shape are the same elements in memory."""
    return a is b or (a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.stride() == b.stride()
                      and a.storage_offset() == b.storage_offset())


def resolved(x):
    """Return x with lazy conjugation or negation done: `z.conj()` holds z's numbers, and a bit to conjugate them."""
    if x.is_conj() or x.is_neg():
        return mark(x.resolve_conj().resolve_neg(), "communication")
    return x


def check_out(collective, x, out, rank):
    """Raise ValueError unless a collective may write to `out` while it reads x."""
    if not out.is_contiguous():
        if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
            raise ValueError(f"out has {describe(out)} and strides {out.stride()}: its elements share memory; "
                             "give another out")
        return  # the result goes to another tensor first, and is copied
    if collective == "recv":  # it does not read x
        return
    if x.untyped_storage()._cdata != out.untyped_storage()._cdata or not x.is_contiguous():
        return
    begin = x.storage_offset() - out.storage_offset()
    if begin >= out.numel() or begin + x.numel() <= 0:  # they do not overlap
        return
    if collective in ("all_reduce", "broadcast") and begin == 0:
        return
    if collective == "all_gather" and begin == rank * x.numel():
        return
    if collective == "reduce_scatter" and begin == -rank * out.numel():
        return
    raise ValueError(f"{collective} cannot write to the memory that it reads: give another out, or none")


def describe(tensor, shape=None):
    """Describe a tensor in an error message."""
    return f"shape {tuple(tensor.shape if shape is None else shape)}, {tensor.dtype} on {tensor.device}"
