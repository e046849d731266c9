"""The block codec's kernels on a GPU beside plain torch, and a step of ZeRO-3 with both codecs."""

import math

import pytest
import torch
from quantized_bodies import engine_of
from zero_kit import farthest, parameters_of, train_gpt

from refimpl import memory
from refimpl.comm import launch
from refimpl.zero.quantized import BlockCodec


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_beside_plain_torch(cuda, bits, dtype):
    """Codes and scales to the bit; a mean of three but for the rounding of one product and sum."""
    for block, scale in ((256, torch.float32), (16, torch.bfloat16), (4096, torch.float32)):
        for n in (1, 257, 100_003):
            codec, plain = (BlockCodec(bits, block, scale, kernel) for kernel in ("triton", "torch"))
            x = (torch.randn(3, n, device=cuda) * 3).to(dtype)
            x[1, n // 2], x[2, n // 3 : n // 2] = math.nan, 0
            payloads = [torch.zeros(3, codec.payload_bytes(n), dtype=torch.uint8, device=cuda) for _ in range(2)]
            means = [torch.empty(1, n, device=cuda) for _ in range(2)]
            for each, payload, mean in zip((codec, plain), payloads, means, strict=True):
                each.encode(x, payload)
                each.decode(payload[None], mean)
            for ours, theirs in zip(codec.parts(payloads[0], n), codec.parts(payloads[1], n), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(*means, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.bytes
def test_kernels_take_no_memory(cuda):
    n = 2**22
    codec, x = BlockCodec(), torch.randn(1, n, device=cuda)
    payload = torch.empty(1, codec.payload_bytes(n), dtype=torch.uint8, device=cuda)
    codec.encode(x, payload)
    with memory.measure("cuda") as m:
        codec.encode(x, payload)
        codec.decode(payload[None], x)
    assert m.peak == 0


def steps(comm):
    """How far two steps with codecs are from two without; the device."""
    found = []
    for codecs in ({}, {"weights": BlockCodec(), "gradients": BlockCodec(), "ranks_per_machine": 2}):
        engine = engine_of(comm, 3, **codecs)
        train_gpt(engine, 2)
        found.append(parameters_of(engine))
    return farthest(*found), next(iter(found[0].values())).device.type


def test_ranks_that_share_one_gpu():
    for far, device in launch(steps, 4, device="cuda:0"):
        assert device == "cuda" and 0 < far < 0.01
