"""The forward for Hopper: values in the interpreter. What the compiler makes of it:
tests/benchmarks/compiler. On a GPU: tests/gpu."""

import functools
import itertools
import math

import attention_kit as kit
import pytest
import torch
from interpreting import interpreted

from refimpl.attention import flash_attention, gluon_forward, reference_attention, triton_forward
from refimpl.attention import triton_hopper as hopper

FULL, CAUSAL = {"causal": False, "window": None}, {"causal": True, "window": None}
WINDOW = {"causal": False, "window": 20}
CALLS = [  # (B, H, G, T, S, D), mask
    ((1, 2, 1, 130, 130, 64), CAUSAL), ((2, 4, 2, 40, 300, 40), CAUSAL), ((1, 2, 1, 300, 100, 96), CAUSAL),
    ((1, 1, 1, 1, 257, 128), FULL), ((2, 2, 2, 257, 128, 64), FULL), ((1, 2, 2, 257, 129, 64), WINDOW),
    ((1, 2, 1, 300, 400, 112), {"causal": True, "window": 100}), ((1, 1, 1, 200, 3, 64), WINDOW),
    ((1, 2, 1, 150, 70, 256), CAUSAL), ((3, 2, 1, 129, 129, 16), {"causal": True, "window": 0}),
    # tiles on both sides of the band, and between them some that every row sees
    ((1, 1, 1, 520, 600, 16), {"causal": False, "window": 300}), ((1, 1, 1, 400, 700, 16), CAUSAL)]
SIZES = [(1, 2, 3, 2), (4, 5, 8, 2), (7, 4, 3, 4), (9, 1, 9, 1), (12, 4, 32, 4)]  # programs, heads, tiles, section
DTYPES = [torch.float32, torch.float16]
near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def forwards(inputs, masks):
    """The calls of the kernel's forward."""
    return [("refimpl.attention.triton_hopper:forward", x, {"scale": x[0].shape[-1] ** -0.5} | mask)
            for x, mask in zip(inputs, masks, strict=True)]


def inputs_of_calls(dtype):
    return [kit.inputs(*shape, dtype, requires_grad=False)[:3] for shape, _ in CALLS]


def inputs_strided_and_not_finite():
    """q, k, v in other strides, twice, and with a value that is not finite, four times."""
    q, k, v, _ = kit.inputs(2, 4, 2, 140, 140, 64, requires_grad=False)
    packed = torch.cat([q.unflatten(1, (2, 2)).transpose(1, 2)[:, 0], k, v], dim=3).split(64, dim=3)  # two heads of q
    given = [kit.transposed(q, k, v), packed, *([x.clone() for x in (q, k, v)] for _ in range(4))]
    given[2][0][0, :, 50, 1] = math.nan
    given[3][1][0, :, 50, 1] = math.inf
    given[4][2][0, :, 50, 1] = -math.inf
    given[5][0][:, :, 50], given[5][1][:] = -math.inf, 1.0  # a row whose every score is −∞: NaN, as softmax has it
    return given


@pytest.fixture(scope="module")
def found():
    """{what: results}: all that is asked of the interpreter, together."""
    masks = [mask for _, mask in CALLS]
    calls = {dtype: forwards(inputs_of_calls(dtype), masks) for dtype in DTYPES}
    given = inputs_strided_and_not_finite()
    calls |= {"not finite": forwards(given, [CAUSAL] * len(given))}
    # head · tiles + tile by (program, turn), −1 for none, for each (programs, heads, tiles, section)
    calls |= {"places": [("kernels_to_interpret:places", sizes, {}) for sizes in SIZES]}
    results = iter(interpreted(sum(calls.values(), [])))
    return {what: list(itertools.islice(results, len(each))) for what, each in calls.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_reference(dtype, found):
    for x, (shape, mask), (out, lse2) in zip(inputs_of_calls(dtype), CALLS, found[dtype], strict=True):
        expected, lse = reference_attention(*x, **mask, return_logsumexp=True)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-3
        assert out.dtype == dtype and out.transpose(1, 2).is_contiguous() and lse2.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, msg=f"{shape} {mask}")
        torch.testing.assert_close(lse2 * math.log(2), lse, rtol=1e-5, atol=1e-5, msg=f"{shape} {mask}")
        fully_masked = lse == -math.inf
        assert (out[fully_masked] == 0).all() and fully_masked.any() == (shape in [
            (1, 2, 1, 300, 100, 96), (1, 2, 2, 257, 129, 64), (1, 1, 1, 200, 3, 64), (1, 2, 1, 150, 70, 256)])


def test_any_strides_that_suit_and_values_that_are_not_finite(found):
    given, results = inputs_strided_and_not_finite(), found["not finite"]
    transposed, packed = given[:2]
    assert all(hopper.aligned(x) for x in (*transposed, *packed)) and not packed[0].is_contiguous()
    for x, (out, _) in zip(given[:2], results[:2], strict=True):
        torch.testing.assert_close(out, reference_attention(*x, causal=True))
    for x, (out, _) in zip(given[2:], results[2:], strict=True):
        reference = reference_attention(*x, causal=True)
        rows = slice(None) if not x[2].isinf().any() else slice(50, None)  # 0 · ∞ before it, in a tile that has it
        torch.testing.assert_close(out[:, :, rows], reference[:, :, rows], equal_nan=True)
        assert reference.isnan().any() or x[2].isinf().any()


def test_which_tensors_suit():
    def aligned(*shape, dtype=torch.bfloat16):
        return hopper.aligned(torch.empty(*shape, dtype=dtype, device="meta"))

    assert aligned(1, 2, 3, 64) and aligned(2, 3, 5, 40) and not aligned(2, 3, 5, 59) and aligned(1, 1, 1, 59)
    x = torch.empty(2, 4, 6, 64, dtype=torch.float16)
    assert hopper.aligned(x.transpose(1, 2)) and not hopper.aligned(x.mT) and not hopper.aligned(x[..., 1:])
    assert not hopper.aligned(x[:, :1].expand(-1, 4, -1, -1)) and not hopper.aligned(x[..., 4:])
    assert not hopper.suits(x, x, x)  # not on a GPU


@kit.in_the_interpreter()[0]
@kit.in_the_interpreter()[1]
@pytest.mark.filterwarnings("ignore::DeprecationWarning:triton")  # Triton 3.6 interprets in a way that NumPy warns of
def test_a_kernel_by_name_is_the_one_that_runs(monkeypatch):
    ran = []  # Gluon has no interpreter: what is computed under its name is Hopper's
    runs = {"hopper": hopper.forward, "gluon": hopper.forward, "pointers": triton_forward.forward}
    for name, module in {"hopper": hopper, "gluon": gluon_forward, "pointers": triton_forward}.items():
        monkeypatch.setattr(module, "forward", lambda *given, _name=name, **options: (
            ran.append(_name) or runs[_name](*given, **options)))
        monkeypatch.setattr(module, "suits", lambda *_: True, raising=False)
    for kernel in ("hopper", "gluon", "triton", "auto"):
        kit.assert_as_reference(functools.partial(flash_attention, kernel=kernel), near,
                                kit.inputs(1, 2, 1, 40, 40, 16), causal=True, window=9)
    assert ran == ["hopper", "gluon", "pointers", "pointers"]


def test_each_tile_of_each_head_has_its_turn_once_and_the_last_ones_come_first(found):
    for (programs, heads, tiles, section), places in zip(SIZES, found["places"], strict=True):
        assert sorted(places[places >= 0].tolist()) == list(range(heads * tiles))
        assert (places[:, 0] % tiles).tolist() == [tiles - 1 - i // section for i in range(programs)]


def test_a_causal_mask_gives_each_program_much_the_same(found):
    def most(places):  # tile i sees i + 1 tiles of keys
        work = torch.where(places >= 0, places % 32 + 1, 0).sum(1)
        return (work.max() / work.float().mean()).item()

    in_order = torch.nn.functional.pad(torch.arange(128), (0, 4), value=-1).view(-1, 12).T
    assert most(found["places"][SIZES.index((12, 4, 32, 4))]) < 1.05 and most(in_order) > 1.1
