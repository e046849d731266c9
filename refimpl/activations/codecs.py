"""Storages in fewer bytes: bits for what has two values, bfloat16, and 8 bits a value in groups.

Each `encode_…` takes the flat view of a storage (n elements) and returns an object with `decode()`, which gives n
elements of the same dtype back; next to it stands `…_bytes`, what its tensors take.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

LEVELS = 255  # the largest code
CHUNK = 2**22  # elements that are worked on at a time, so that the workspace does not grow with the tensor
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size: to compare values bit for bit


def has_values(tensor):
    """Tell whether the tensor has values: a fake or meta tensor has a shape and no values."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


@dataclass(frozen=True)
class Bits:
    """One bit an element: a boolean mask, or a choice between two `values` (bit patterns, lower and higher)."""

    bits: torch.Tensor  # (⌈n/8⌉,) uint8
    n: int
    dtype: torch.dtype
    values: torch.Tensor | None = None  # (2,) integers

    def decode(self):
        """Return (n,) elements, the very bits that were encoded."""
        ones = torch.empty(self.n, dtype=torch.uint8, device=self.bits.device)
        for i in range(min(8, self.n)):
            part = ones[i::8]
            torch.bitwise_and(self.bits[: part.numel()] >> i, 1, out=part)
        ones = ones.view(torch.bool)
        if self.values is None:
            return ones
        return torch.where(ones, self.values[1], self.values[0]).view(self.dtype)


def encode_bits(mask):
    """Encode a boolean tensor (n,) as Bits: the i-th element is bit i mod 8 of byte ⌊i/8⌋."""
    return Bits(_bits(mask), mask.numel(), mask.dtype)


def encode_two_values(flat):
    """Encode a tensor (n,) that holds at most two different bit patterns as Bits, such as dropout's 0 and 1/(1 − p).

    Returns None if there are more, or if the tensor has no values (a fake or meta tensor).
    """
    if not has_values(flat) or flat.dtype.itemsize not in INTEGERS or not flat.numel():
        return None
    integers = flat.view(INTEGERS[flat.dtype.itemsize])  # bit for bit: as floats −0 equals 0, and NaN nothing
    low, high = integers.aminmax()
    ones = integers == high
    if not bool((ones | (integers == low)).all()):
        return None
    return Bits(_bits(ones), flat.numel(), flat.dtype, torch.stack((low, high)))


def _bits(mask):
    packed = torch.zeros(-(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    for i in range(min(8, mask.numel())):
        part = mask[i::8].ne(0).view(torch.uint8)
        packed[: part.numel()] |= part << i  # eight strided passes: no tensor of eight times the size
    return packed


def mask_bytes(n, itemsize=1):
    """Return ⌈n/8⌉ for a boolean mask; + 2·itemsize for two values of more than a byte, which are stored beside."""
    return -(-n // 8) + (2 * itemsize if itemsize > 1 else 0)


@dataclass(frozen=True)
class BFloat16Values:
    """The values rounded to bfloat16."""

    values: torch.Tensor  # (n,) bfloat16
    dtype: torch.dtype

    def decode(self):
        """Return (n,) elements, each off by at most 2⁻⁸ of its own size (subnormals aside)."""
        return self.values.to(self.dtype)


def encode_cast(flat):
    """Round floating values (n,) to bfloat16. inf and NaN stay; what is above 3.39e38 becomes inf."""
    return BFloat16Values(flat.to(torch.bfloat16), flat.dtype)


def cast_bytes(n):
    """Return 2·n."""
    return 2 * n


@dataclass(frozen=True)
class Groups:
    """8 bits an element, and for each group of elements its least value and the step between two codes, in fp32."""

    codes: torch.Tensor  # (n,) uint8
    ranges: torch.Tensor  # (2, ⌈n/g⌉) fp32: least values, steps
    group: int
    dtype: torch.dtype

    def decode(self):
        """Return (n,) elements: least + code · step of their group."""
        flat = torch.empty(self.codes.numel(), dtype=self.dtype, device=self.codes.device)
        for begin, end, first, last in slices(flat.numel(), self.group):  # piece by piece: the workspace stays at CHUNK
            least, step = (each[first:last, None] for each in self.ranges)
            part = flat[begin:end].view(last - first, -1)
            wide = part.copy_(self.codes[begin:end].view_as(part)) if self.dtype is torch.float32 else self.codes[
                begin:end].view_as(part).float()
            part.copy_(wide.mul_(step).add_(least))
        return flat


def encode_groups(flat, group, generator=None):
    """Encode floating values (n,) as Groups of `group` elements in a row; the last may be shorter. Returns None if a
    value is inf or NaN, or if a group's range is no fp32 number.

        step = (max − min) / 255        code = round((x − min) / step)        |x − x̂| ≤ step / 2

    With a `generator`, codes are rounded up or down at random so that their mean is right (stochastic rounding): code =
    ⌊(x − min) / step + u⌋ with u uniform in [0, 1), and |x − x̂| < step. "ActNN: Reducing Training Memory Footprint via
    2-Bit Activation Compressed Training" (Chen et al. 2021) quantizes so, by groups and in fewer bits.
    """
    n, device = flat.numel(), flat.device
    codes = torch.empty(n, dtype=torch.uint8, device=device)
    ranges = torch.empty(2, -(-n // group), dtype=torch.float32, device=device)
    for begin, end, first, last in slices(n, group):
        x = flat[begin:end].view(last - first, -1).float()
        least, most = x.aminmax(dim=1, keepdim=True)
        step = (most - least) / LEVELS
        levels = (x - least).div_(torch.where(step > 0, step, 1))
        if generator is None:
            levels.round_()
        else:
            levels.add_(torch.rand(levels.shape, generator=generator, device=device)).floor_()
        codes[begin:end].view_as(levels).copy_(levels.clamp_(0, LEVELS))  # 255 + u can round to 256
        ranges[0, first:last], ranges[1, first:last] = least[:, 0], step[:, 0]
    if has_values(flat) and not bool(ranges.isfinite().all()):
        return None
    return Groups(codes, ranges, group, flat.dtype)


def group_bytes(n, group):
    """Return n + 8·⌈n/g⌉: a byte a value, two fp32 numbers a group of g."""
    return n + 8 * -(-n // group)


def slices(n, group):
    """Yield (begin, end, first group, last group) of each part of n elements; the short group is a part of its own."""
    whole = n // group
    rows = max(1, CHUNK // group)
    for first in range(0, whole, rows):
        last = min(whole, first + rows)
        yield first * group, last * group, first, last
    if n % group:
        yield whole * group, n, whole, whole + 1
