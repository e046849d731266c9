"""Kernels of which the compile report must say the right thing."""

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
