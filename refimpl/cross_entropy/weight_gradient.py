"""The weight's gradient while it adds up over chunks of rows, and when it is handed on.

A weight in 16 bits has a gradient dW in 16 bits, V·C·2 bytes, and its sum in fp32 takes twice as many. The gradient's
memory has room for half of the sum: rows 0 … V/2 − 1 lie there while they add up, the others beside it. In the end each
row is rounded into its own place in the gradient. From the first row on, none is written where one is yet to be read:
row i is read from byte 4·C·i and written to byte 2·C·i. Then the other half is freed.

    V·C·2 + V·C·2     while it adds up, and at its peak; a sum with its cast beside it takes V·C·4 + V·C·2
    V·C·2             handed on
"""

import torch


class WeightSum:
    """dW (V, C), summed in `dtype`, the weight's own or a wider one. `parts`: its rows, one part after another."""

    def __init__(self, weight, dtype):
        self.dtype, (V, C) = dtype, weight.shape
        if dtype == weight.dtype or weight.dtype.itemsize > 2:  # only 16 bits have a wider sum
            self.result, self.parts = None, [torch.zeros_like(weight, dtype=dtype)]
            return
        self.result = torch.empty_like(weight, memory_format=torch.contiguous_format)
        # the gradient's own bytes, read as fp32
        front = self.result.view(-1)[: V // 2 * C * 2].view(dtype).view(V // 2, C).zero_()
        self.parts = [front, weight.new_zeros((V - V // 2, C), dtype=dtype)]

    def add(self, z_RV, narrow_RV, h_RC):
        """Add zᵀ h. A GPU multiplies 16-bit matrices into fp32; a CPU's product is of 32-bit matrices, which `z_RV`
        has. `narrow_RV`: the same in the dtype of `h_RC`."""
        mixed = h_RC.dtype != self.dtype
        if mixed and not h_RC.is_cuda:
            narrow_RV, h_RC, mixed = z_RV, h_RC.to(self.dtype), False
        for part, z in zip(self.parts, narrow_RV.split([len(part) for part in self.parts], 1), strict=True):
            if mixed:
                torch.ops.aten.addmm.dtype_out(part, z.T, h_RC, self.dtype, out=part)
            else:
                part.addmm_(z.T, h_RC)

    def handed_on(self, scale, dtype, rows):
        """Return dW times `scale`, in `dtype`, the weight's; it cannot be asked for twice. Some rows at a time."""
        parts, self.parts = self.parts, None
        if self.result is None:
            return scaled(parts.pop(), scale, dtype, rows)
        out, self.result, start = self.result, None, 0
        while parts:
            part = parts.pop(0)  # no list keeps a half that is done
            for first in range(0, len(part), rows):
                product = part[first : first + rows] * scale  # beside both, which overlap in the first rows
                out[start + first : start + first + len(product)] = product
                del product
            start += len(part)
        return out


def scaled(x, scale, dtype, rows):
    """Return x · scale in `dtype`: in place where that is x's own, else, and for 16 bits, some rows at a time."""
    if x is None:
        return None
    if x.dtype == dtype and x.dtype.itemsize > 2:
        return x.mul_(scale)
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    for first in range(0, len(x), rows):
        part = x[first : first + rows]
        out[first : first + rows] = part.mul_(scale) if x is not out else part.float().mul_(scale)
    return out
