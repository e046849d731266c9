"""Numbers in blocks of int8 or int4, each block with a scale of its own, in plain torch.

    s = max |x| / L in each block of b numbers          L = 127 with 8 bits, 7 with 4
    q = round(x / s)        x̂ = s · q                   |x − x̂| ≤ s / 2

A payload of n numbers, in bytes, each part rounded up to a multiple of 16:

    | ⌈n/b⌉ scales, 4 bytes each | n codes, 1 byte each (two in a byte with 4 bits) |

so 1 + 4/256 bytes a number, with 8 bits and the default block, in place of 4. One scale for a whole tensor would be as
large as its largest number asks; "ZeRO++" (Wang et al. 2023), section 3.1, takes blocks for that, as "8-bit optimizers
via block-wise quantization" (Dettmers et al. 2022) does. An inf or NaN makes its whole block NaN. Blocks whose largest
number is below L · 2⁻¹²⁶ become zeros: their scale would have few bits.
"""

import dataclasses

import torch
from torch.nn import functional as F

from ...common.interpreter import new_enough
from ..bucket import ALIGNMENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (torch.float32, torch.bfloat16)
KERNELS = ("auto", "torch", "triton")
SLICE = 2**16  # numbers that are in fp32 at a time, besides what is read and written
SMALLEST = torch.finfo(torch.float32).tiny  # of scales


@dataclasses.dataclass(frozen=True)
class BlockCodec:
    """Encodes flat tensors of fp32, bf16 or fp16 to payloads of uint8, and decodes the mean of payloads.

    - `bits`: 8 or 4, of a number.
    - `block`: numbers that share a scale, a power of two from 16 to 4096.
    - `scale_dtype`: fp32 or bf16. A bf16 scale is itself rounded; |x − x̂| ≤ s / 2 holds for it, too.
    - `kernel`: "triton", "torch", or "auto": Triton's for CUDA tensors (capability 8.0 on), else torch's.

    ValueError for other values. TypeError for tensors of another dtype.
    """

    bits: int = 8
    block: int = 256
    scale_dtype: torch.dtype = torch.float32
    kernel: str = "auto"

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits!r}: expected 8 or 4")
        if not isinstance(self.block, int) or self.block not in [2**i for i in range(4, 13)]:
            raise ValueError(f"block={self.block!r}: expected a power of two from 16 to 4096")
        if self.scale_dtype not in SCALES:
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: expected torch.float32 or torch.bfloat16")
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel={self.kernel!r}: expected one of {', '.join(KERNELS)}")

    @property
    def limit(self):
        """Return L, the largest code."""
        return 2 ** (self.bits - 1) - 1

    def scale_bytes(self, numel):
        """Return the bytes of a payload's scales, where its codes begin."""
        return _aligned(-(-numel // self.block) * self.scale_dtype.itemsize)

    def payload_bytes(self, numel):
        """Return the bytes of the payload of `numel` numbers, whatever their dtype."""
        return self.scale_bytes(numel) + _aligned(-(-numel * self.bits // 8))

    def parts(self, payloads, numel):
        """Return (scales, codes as uint8) of payloads (…, payload_bytes(numel)), as views of them."""
        cut = self.scale_bytes(numel)
        return (payloads[..., :cut].view(self.scale_dtype)[..., : -(-numel // self.block)],
                payloads[..., cut : cut + -(-numel * self.bits // 8)])

    def encode(self, x, payloads, numel=None):
        """Write each row of x (R, n) to a row of payloads (R, payload_bytes(numel)). Rows may lie apart.

        `numel`: for how many numbers the payload has room, by default n; what follows the n-th is left as it is.
        """
        by_triton = self._by_triton(x)
        if not x.numel():
            return
        scales, codes = self.parts(payloads, x.shape[1] if numel is None else numel)
        if by_triton:
            torch.ops.refimpl.quantize_blocks(x, scales, codes, self.bits, self.block)
            return
        for row, row_scales, row_codes in zip(x, scales, codes, strict=True):
            for first in range(0, len(row), SLICE):
                self._encode(row[first : first + SLICE], row_scales[first // self.block :],
                             row_codes[first * self.bits // 8 :])

    def decode(self, payloads, out, numel=None):
        """Write to each row of out (G, n) the mean of its R payloads (G, R, payload_bytes(numel)): summed in fp32 in
        the order of R, and rounded to the dtype of `out` once."""
        by_triton = self._by_triton(out)
        if not out.numel():
            return
        scales, codes = self.parts(payloads, out.shape[1] if numel is None else numel)
        if by_triton:
            torch.ops.refimpl.dequantize_blocks(scales, codes, out, self.bits, self.block)
            return
        for row, row_scales, row_codes in zip(out, scales, codes, strict=True):
            for first in range(0, len(row), SLICE):
                part = row[first : first + SLICE]
                part.copy_(self._mean(row_scales[:, first // self.block :], row_codes[:, first * self.bits // 8 :],
                                      len(part)))

    def _encode(self, x, scales, codes):
        """Encode a slice."""
        n, size = len(x), -(-len(x) // self.block)
        blocks = F.pad(x.to(torch.float32, copy=True), (0, -n % self.block)).view(size, self.block)
        s = torch.linalg.vector_norm(blocks, float("inf"), 1).div_(_on_device(self.limit, blocks))
        s = torch.where(s < SMALLEST, 0, s).to(self.scale_dtype)  # a subnormal scale would have few bits
        scales[:size] = s  # rounded: codes are made with the scale that is read back
        blocks.div_(torch.where(s == 0, 1, s).float()[:, None]).round_().clamp_(-self.limit, self.limit)
        q = blocks.nan_to_num_(0).view(-1)  # the scale of such a block is NaN, which is enough
        if self.bits == 4:
            even, odd = q[: n + n % 2].view(-1, 2).to(torch.int8).unbind(1)
            codes[: -(-n // 2)] = ((even & 15) | (odd << 4)).view(torch.uint8)
        else:
            codes[:n].view(torch.int8).copy_(q[:n])

    def _mean(self, scales, codes, n):
        """Return the mean of the rows of a slice of n numbers, in fp32."""
        size, total = -(-n // self.block), None
        for s, q in zip(scales, codes, strict=True):
            if self.bits == 4:
                pairs = q[: -(-n // 2)]
                q = torch.stack((pairs & 15, pairs >> 4), 1).view(torch.int8).view(-1).bitwise_xor_(8).sub_(8)
            blocks = torch.zeros(size * self.block, device=s.device)
            blocks[:n].copy_(q.view(torch.int8)[:n])
            blocks.view(size, -1).mul_(s[:size, None].float())
            total = blocks if total is None else total.add_(blocks)
            del blocks
        return (total.div_(_on_device(len(codes), total)) if len(codes) > 1 else total)[:n]

    def _by_triton(self, x):
        if x.dtype not in DTYPES:
            raise TypeError(f"{x.dtype}: a BlockCodec takes float32, bfloat16 and float16; int8 has no more bits")
        if self.kernel == "torch" or self.kernel == "auto" and x.device.type != "cuda":
            return False
        from . import operators  # makes torch.ops.refimpl.quantize_blocks

        if self.kernel == "triton" and not operators.HAS_TRITON:
            raise RuntimeError("kernel='triton', and Triton is not installed: pip install triton, or kernel='auto'")
        return operators.HAS_TRITON and (self.kernel == "triton" or new_enough(x.device))


def _on_device(number, x):
    """A tensor of one number. To divide by a Python number, CUDA multiplies by its rounded reciprocal."""
    return torch.full((1,), number, dtype=x.dtype, device=x.device)


def _aligned(nbytes):
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
