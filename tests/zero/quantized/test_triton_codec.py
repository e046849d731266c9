"""The codec's kernels, interpreted: the bits of plain torch; what the interpreter gets wrong is refused."""

import dataclasses
import math

import torch
from interpreting import interpreted

from refimpl.zero.quantized import BlockCodec


def test_the_kernels_write_the_same_bits():
    cases = []
    for bits, block, scale in ((8, 256, torch.float32), (4, 256, torch.float32), (8, 16, torch.float32)):
        x = torch.randn(3, 2 * 2048 + 3) * 3
        x[1, 700], x[2, 3:300] = math.nan, 0
        cases.append((BlockCodec(bits, block, scale), x))
    cases.append((BlockCodec(4, 4096), torch.randn(2, 5000).half()))
    found = interpreted([("quantized_bodies:through", (dataclasses.replace(codec, kernel="triton"), x), {})
                         for codec, x in cases])
    for (codec, x), (scales, codes, mean) in zip(cases, found, strict=True):
        payloads = torch.zeros(len(x), codec.payload_bytes(x.shape[1]), dtype=torch.uint8)
        codec.encode(x, payloads)
        expected = torch.empty(1, x.shape[1])
        codec.decode(payloads[None], expected)
        for ours, theirs in zip((scales, codes, mean), (*codec.parts(payloads, x.shape[1]), expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_interpreter_is_refused_what_it_computes_wrongly():
    for codec, dtype in ((BlockCodec(), torch.bfloat16), (BlockCodec(scale_dtype=torch.bfloat16), torch.float32)):
        said, = interpreted([("quantized_bodies:refused", (dataclasses.replace(codec, kernel="triton"), dtype), {})])
        assert said.startswith("bfloat16 under TRITON_INTERPRET=1")
