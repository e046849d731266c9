"""Blocks of int8 and int4: payloads of the closed form, errors of at most half a step, NaN that stays."""

import math

import pytest
import torch

from refimpl.zero.quantized import BlockCodec
from refimpl.zero.quantized.codec import SLICE, SMALLEST

CASES = [(8, 256, torch.float32), (4, 256, torch.float32), (8, 16, torch.bfloat16), (4, 64, torch.bfloat16)]


def through(codec, x, numel=None):
    """x (R, n) → (payloads, each decoded)."""
    payloads = torch.zeros(len(x), codec.payload_bytes(numel or x.shape[1]), dtype=torch.uint8)
    codec.encode(x, payloads, numel)
    out = torch.empty(x.shape)
    codec.decode(payloads[:, None], out, numel)
    return payloads, out


@pytest.mark.parametrize(("bits", "block", "scale"), CASES)
def test_errors_are_half_a_step_at_most(bits, block, scale):
    codec = BlockCodec(bits, block, scale)
    assert through(codec, torch.ones(2, 0))[1].shape == (2, 0)
    for n in (1, 15, 16, 257, 1000, SLICE + 17):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(2, n) * torch.logspace(-3, 3, n)).to(dtype)
            payloads, found = through(codec, x)
            scales, _ = codec.parts(payloads, n)
            steps = scales.float().repeat_interleave(block, 1)[:, :n]
            assert ((found - x.float()).abs() <= steps / 2 * (1 + 1e-5)).all()
            tops = torch.stack([part.abs().amax(1) for part in x.float().split(block, 1)], 1)
            torch.testing.assert_close(scales.float(), tops / codec.limit, rtol=2**-8, atol=SMALLEST)


def test_a_payload_has_the_bytes_of_its_formula():
    for bits, each in ((8, 1), (4, 0.5)):
        for n in (0, 1, 256, 257, 100_000):
            exact = 4 * math.ceil(n / 256) + math.ceil(n * each)
            assert 0 <= BlockCodec(bits).payload_bytes(n) - exact < 32 and BlockCodec(bits).payload_bytes(n) % 16 == 0
    assert BlockCodec().payload_bytes(2**20) == 2**20 * (1 + 4 / 256)
    assert BlockCodec(4, scale_dtype=torch.bfloat16).payload_bytes(2**20) == 2**20 * (1 / 2 + 2 / 256)


def test_one_scale_for_all_would_lose_the_small_numbers():
    """The mutant: blocks of 4096 numbers, of which some are a thousand times as large."""
    x = torch.randn(1, 4096)
    x[0, 0] = 1000
    small, large = ((through(BlockCodec(block=block), x)[1] - x)[0, 256:].norm() / x.norm() for block in (256, 4096))
    assert small < large / 100


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bits, bad):
    x = torch.randn(1, 1000)
    x[0, 300] = bad
    found = through(BlockCodec(bits), x)[1][0]
    assert found[256:512].isnan().all() and found[:256].isfinite().all() and found[512:].isfinite().all()


def test_zeros_and_what_is_nearly_zero_become_zeros():
    for value in (0.0, 1e-44, 1e-37):
        assert not through(BlockCodec(), torch.full((1, 300), value))[1].any()


def test_the_mean_is_added_in_fp32_and_rounded_once():
    x, codec = torch.randn(3, 500), BlockCodec()
    payloads, each = through(codec, x, numel=600)  # room for more
    out = torch.empty(1, 500, dtype=torch.bfloat16)
    codec.decode(payloads[None], out, 600)
    assert torch.equal(out[0], ((each[0] + each[1] + each[2]) / 3).bfloat16())


def test_options_that_there_are_not():
    for options in ({"bits": 2}, {"block": 100}, {"block": 8}, {"scale_dtype": torch.float16}, {"kernel": "cuda"}):
        name, = options
        with pytest.raises(ValueError, match=f"{name}=.*: expected"):
            BlockCodec(**options)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(TypeError, match=f"{dtype}: a BlockCodec takes float32"):
            through(BlockCodec(), torch.ones(1, 4).to(dtype))
