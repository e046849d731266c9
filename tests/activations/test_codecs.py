"""Each code: what comes back, how far off it may be, and its bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.activations import codecs
from refimpl.activations.codecs import encode_bits, encode_cast, encode_groups, encode_two_values, group_bytes

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def nbytes(code):
    return sum(each.untyped_storage().nbytes() for each in vars(code).values() if isinstance(each, torch.Tensor))


def bits_of(x):
    return x.view(torch.uint8).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_a_mask_takes_a_bit_an_element(mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    code = encode_bits(mask)
    assert torch.equal(code.decode(), mask) and code.decode().dtype is torch.bool
    assert nbytes(code) == codecs.mask_bytes(len(mask)) == math.ceil(len(mask) / 8)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int16])
@pytest.mark.parametrize("n", [1, 8, 1001])
def test_two_values_come_back_bit_for_bit(dtype, n):
    noise = torch.empty(n).bernoulli_(0.7).div_(0.7).to(dtype)
    code = encode_two_values(noise)
    assert bits_of(code.decode()) == bits_of(noise) and code.decode().dtype is dtype
    assert nbytes(code) == codecs.mask_bytes(n, dtype.itemsize) == math.ceil(n / 8) + 2 * dtype.itemsize


def test_two_values_are_told_apart_by_their_bits():
    """0 and −0 are equal numbers and different bits; NaN is no number and has bits like any other."""
    for values in ([0.0, -0.0], [math.nan, 1.0], [math.inf, -math.inf], [1.0, 1.0], [5e-324, 0.0]):
        x = torch.tensor(values * 5, dtype=torch.float64)
        assert bits_of(encode_two_values(x).decode()) == bits_of(x)
    assert encode_two_values(torch.tensor([0.0, -0.0, 1.0])) is None and encode_two_values(torch.randn(100)) is None
    assert encode_two_values(torch.tensor([0.0, 1.0, 2.0, 0.0])) is None, "the least and the greatest are not all"
    assert encode_two_values(torch.empty(0)) is None
    assert encode_two_values(torch.zeros(9, dtype=torch.uint8)) is None, "types of one byte are left"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_is_within_half_a_unit_of_bfloat16(dtype):
    x = torch.randn(1000, dtype=dtype)
    code = encode_cast(x)
    assert 0.9 * 2**-8 < ((code.decode() - x).abs() / x.abs()).max() <= 2**-8
    assert code.decode().dtype is dtype and nbytes(code) == codecs.cast_bytes(1000) == 2000
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], dtype=dtype)
    assert torch.equal(encode_cast(special[2:3]).decode().isnan(), special[2:3].isnan())
    assert bits_of(encode_cast(special[[0, 1, 3, 4]]).decode()) == bits_of(special[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "group"), [(1000, 128), (128, 128), (5, 128), (1001, 1), (777, 10)])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_groups_are_within_half_a_step(dtype, n, group, stochastic, scale):
    def bound(x, group, stochastic):
        """(n,): half a step of each element's group (a whole one if stochastic), and what fp32 rounds on the way."""
        off = torch.empty_like(x, dtype=torch.float64)
        for begin in range(0, len(x), group):
            part = x[begin : begin + group].double()
            step = (part.max() - part.min()) / 255
            off[begin : begin + group] = step * (1 if stochastic else 0.5) + 2**-21 * part.abs().max() + 2**-149
        return off
    x = (scale * torch.randn(n) + 3 * scale).to(dtype)
    code = encode_groups(x, group, torch.Generator().manual_seed(1) if stochastic else None)
    decoded = code.decode()
    off = (decoded.double() - x.double()).abs()
    assert (off <= bound(x, group, stochastic) + x.double().abs() * torch.finfo(dtype).eps).all()
    assert decoded.dtype is dtype and nbytes(code) == group_bytes(n, group) == n + 8 * math.ceil(n / group)


def test_the_bound_is_reached():
    """A code with fewer levels, or one that rounds down, would not be within the bound by much: it is sharp."""
    x = torch.linspace(0, 255, 511)  # every second one lies in the middle of two codes
    off = (encode_groups(x, 511).decode() - x).abs()
    assert off.max() == 0.5 and off[::2].max() == 0


@pytest.mark.parametrize("stochastic", [False, True])
def test_what_needs_no_rounding_is_exact(stochastic):
    numbers = torch.Generator().manual_seed(0) if stochastic else None
    for x in (torch.full((300,), 0.1), torch.zeros(300), torch.full((7,), -3e38), torch.arange(256.0),
              torch.tensor([5.0])):
        assert torch.equal(encode_groups(x, 256, numbers).decode(), x)


def test_zeros_beside_positive_values_stay_zeros():
    """As in a softmax under a causal mask."""
    x = torch.rand(512).softmax(0).where(torch.arange(512) % 3 > 0, 0)
    assert ((encode_groups(x, 128).decode() == 0) >= (x == 0)).all()


def test_subnormal_values_are_no_farther_off_than_the_least_step():
    x = torch.tensor([0.0, 1e-44, 3e-44, 1e-40, 5e-39])
    assert ((encode_groups(x, 2).decode() - x).abs() <= 255 * 2**-149 + x.amax() / 510).all()
    assert torch.equal(encode_groups(x[:2], 2).decode(), torch.zeros(2)), "no step so small"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_inf_and_nan_are_not_rounded(value, dtype):
    for where in (0, 500, 999):
        x = torch.randn(1000, dtype=dtype)
        x[where] = value
        assert encode_groups(x, 128) is None
    assert encode_groups(torch.tensor([3e38, -3e38]), 2) is None, "their range is no fp32 number"
    assert encode_groups(torch.tensor([1e300, 0], dtype=torch.float64), 2) is None


def test_stochastic_rounding_is_right_in_the_mean_and_nearest_is_not():
    x = torch.linspace(0, 1, 1001)
    runs, numbers, step = 400, torch.Generator().manual_seed(0), 1 / 255
    mean = sum(encode_groups(x, 1001, numbers).decode().double() for _ in range(runs)) / runs
    five_sigma = 5 * 0.5 * step / math.sqrt(runs)  # a code is off by a Bernoulli's σ ≤ step/2
    assert (mean - x).abs().max() < five_sigma
    assert (encode_groups(x, 1001).decode() - x).abs().max() > 1.8 * five_sigma
    assert (mean - x).mean().abs() < five_sigma / math.sqrt(1001)


def test_the_greatest_value_is_never_rounded_up_into_the_least():
    """255 + u is 256 in fp32 for one u in 131,072, the greatest; and 256 is 0 in a byte."""
    x = torch.full((2_000_000,), 255.0)
    x[0] = 0  # so that a step is 1
    assert torch.equal(encode_groups(x, len(x), torch.Generator().manual_seed(0)).decode(), x)


def test_the_workspace_does_not_grow_with_the_tensor(monkeypatch):
    x = torch.randn(1000)
    expected = encode_groups(x, 10)
    monkeypatch.setattr(codecs, "CHUNK", 64)
    assert max(end - begin for begin, end, _, _ in codecs.slices(1000, 10)) == 60
    found = encode_groups(x, 10)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.ranges, expected.ranges)
    assert torch.equal(found.decode(), expected.decode())
    assert [end for _, end, _, _ in codecs.slices(205, 100)] == [100, 200, 205], "at least one group at a time"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), st.integers(1, 70))
def test_slices_cover_everything_once(n, group):
    elements, groups = [], []
    for begin, end, first, last in codecs.slices(n, group):
        elements += range(begin, end)
        groups += range(first, last)
        assert (end - begin) % (last - first) == 0
    assert elements == list(range(n)) and groups == list(range(math.ceil(n / group)))
