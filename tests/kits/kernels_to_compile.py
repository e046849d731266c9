"""Kernels of which the compile report must say the right thing."""

import os
import sys

import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, out_ptr, stride, N: tl.constexpr):
    """One matrix product of N × N."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * stride + columns), tl.load(b_ptr + rows * stride + columns)
    tl.store(out_ptr + rows * stride + columns, tl.dot(a, b).to(out_ptr.dtype.element_ty))


@triton.jit
def copied(a_ptr, out_ptr, stride, N: tl.constexpr):
    """Rows by the tensor memory accelerator."""
    a = tl.make_tensor_descriptor(a_ptr, [N, N], [stride, 1], [N, N])
    out = tl.make_tensor_descriptor(out_ptr, [N, N], [stride, 1], [N, N])
    out.store([0, 0], a.load([0, 0]))


@triton.jit
def rows_counted_twice(q_ptr, k_ptr, out_ptr, rows, SHARED: tl.constexpr):
    """A kernel whose warps are specialised. With SHARED the row numbers start from the coordinate of q's load: Triton
    3.6 and 3.7 then add the second consumer's 64 rows to them twice. Otherwise they start from another value."""
    k_desc = tl.make_tensor_descriptor(k_ptr, [rows, 64], [64, 1], [128, 64])
    q_desc = tl.make_tensor_descriptor(q_ptr, [rows, 64], [64, 1], [128, 64])
    for tile in tl.range(tl.program_id(0), rows // 128, tl.num_programs(0)):
        q = q_desc.load([tile * 128, 0])
        row = (tile * 128 if SHARED else tile * 128 + rows) + tl.arange(0, 128)
        top = tl.full([128], float("-inf"), tl.float32)
        acc = tl.zeros([128, 64], tl.float32)
        for key in tl.range(0, rows, 128, warp_specialize=True):
            k = k_desc.load([key, 0])
            s = tl.where(row[:, None] >= key + tl.arange(0, 128)[None, :], tl.dot(q, k.T), 0.0)
            top = tl.maximum(top, tl.max(s, 1))
            acc = tl.dot(s.to(k.dtype), k, acc)
        tl.store(out_ptr + row, top + tl.sum(acc, 1))


def __getattr__(name):
    """The kernel `dies` ends the process that asks for it, as a compiler that aborts does."""
    if name == "dies":
        print("out of ideas", file=sys.stderr, flush=True)
        os._exit(3)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
