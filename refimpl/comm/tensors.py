"""Which tensors the backends can reduce and move, and how."""

import torch
import torch.distributed as dist

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
       "product": dist.ReduceOp.PRODUCT}
BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # any, any, all, all: on bytes of 0 and 1
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMED = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)  # gloo and NCCL both have a name for these


def reduction(op, x):
    """torch's name of `op`, if x can be reduced by it; ValueError if not."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: expected one of {', '.join(OPS)}")
    if op == "avg" and x.dtype not in FLOATS:
        raise ValueError(f"op='avg' of {x.dtype}: only float32, float64, float16 and bfloat16 have an average")
    if x.dtype is torch.bool:
        return OPS[BOOL_OPS[op]]
    if x.dtype not in NAMED:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMED)
        raise ValueError(f"{x.dtype} cannot be reduced on the way: expected one of {known} or bool")
    return OPS[op]


def as_bytes(tensor):
    """`tensor` as the backends take it: where they have no name for its dtype, its bytes."""
    if tensor.dtype in NAMED:
        return tensor
    # A contiguous tensor of no or one element may have any stride, and `view` takes none but 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_memory(a, b):
    """Whether two tensors of one shape are one, or aliases."""
    return a is b or (a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.stride() == b.stride()
                      and a.storage_offset() == b.storage_offset())


def look(tensor, shape=None):
    """What an error message says of a tensor."""
    return f"shape {tuple(tensor.shape if shape is None else shape)}, {tensor.dtype} on {tensor.device}"
