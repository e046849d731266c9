"""The cases of the block codec's kernels for the compiler: a shard of 2²⁴ numbers, of 8 ranks."""

import torch

from refimpl.zero.quantized.codec import BlockCodec
from refimpl.zero.quantized.triton_codec import dequantize_launch, quantize_launch

from .compiled import Case
from .table import TARGETS

RANKS, NUMBERS = 8, 2**24


def cases(chips=("datacenter",), change=None):
    """Make {name: Case}. `change`: a function of a Launch that returns another one."""
    found = {}
    for chip in chips:
        for dtype in (torch.bfloat16, torch.float32):
            for codec in (BlockCodec(), BlockCodec(4), BlockCodec(scale_dtype=torch.bfloat16)):
                for kernel, launch in _launches(codec, dtype).items():
                    launch = change(launch) if change else launch
                    scales = " bf16 scales" if codec.scale_dtype is torch.bfloat16 else ""
                    name = f"{kernel}, {str(dtype)[6:]}, int{codec.bits}{scales}, {chip}"
                    found[name] = Case.of(launch, TARGETS[chip])
    return found


def _launches(codec, dtype):
    payloads = torch.empty(1, RANKS, codec.payload_bytes(NUMBERS), dtype=torch.uint8, device="meta")
    scales, codes = codec.parts(payloads, NUMBERS)
    whole = torch.empty(RANKS, NUMBERS, dtype=dtype, device="meta")
    return {"quantize": quantize_launch(whole, scales[0], codes[0], codec.bits, codec.block),
            "dequantize": dequantize_launch(scales, codes, whole[:1], codec.bits, codec.block)}
