"""The forward for Hopper: values in the interpreter, and what the compiler makes of it. On a GPU: tests/gpu."""

import importlib.util
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import triton

from refimpl.attention import hopper, reference_attention
from refimpl.attention.compiled import Case, compile_cases

spec = importlib.util.spec_from_file_location("interpreting", Path(__file__).with_name("interpreting.py"))
interpreting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interpreting)

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


# --- values, in the interpreter --------------------------------------------------------------------------------------


def forwards(inputs, masks):
    """The calls of the kernel's forward."""
    return [("refimpl.attention.hopper:forward", x, {"scale": x[0].shape[-1] ** -0.5} | mask)
            for x, mask in zip(inputs, masks, strict=True)]


def inputs_of_calls(kit, dtype):
    return [kit.inputs(*shape, dtype, requires_grad=False)[:3] for shape, _ in CALLS]


def inputs_strided_and_not_finite(kit):
    """q, k, v in other strides, twice, and with a value that is not finite, four times."""
    q, k, v, _ = kit.inputs(2, 4, 2, 140, 140, 64, requires_grad=False)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    packed = torch.cat([q.unflatten(1, (2, 2)).transpose(1, 2)[:, 0], k, v], dim=3).split(64, dim=3)  # two heads of q
    given = [transposed, packed, *([x.clone() for x in (q, k, v)] for _ in range(4))]
    given[2][0][0, :, 50, 1] = math.nan
    given[3][1][0, :, 50, 1] = math.inf
    given[4][2][0, :, 50, 1] = -math.inf
    given[5][0][:, :, 50], given[5][1][:] = -math.inf, 1.0  # a row whose every score is −∞: NaN, as softmax has it
    return given


@pytest.fixture(scope="module")
def interpreted(kit):
    """{what: results}: all that is asked of the interpreter, in one process."""
    masks = [mask for _, mask in CALLS]
    calls = {dtype: forwards(inputs_of_calls(kit, dtype), masks) for dtype in DTYPES}
    given = inputs_strided_and_not_finite(kit)
    calls |= {"not finite": forwards(given, [CAUSAL] * len(given))}
    # head · tiles + tile by (program, turn), −1 for none, for each (programs, heads, tiles, section)
    calls |= {"places": [("kernels_to_interpret:places", sizes, {}) for sizes in SIZES]}
    results = iter(interpreting.interpreted(sum(calls.values(), [])))
    return {what: list(itertools.islice(results, len(each))) for what, each in calls.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_reference(dtype, kit, interpreted):
    for x, (shape, mask), (out, lse2) in zip(inputs_of_calls(kit, dtype), CALLS, interpreted[dtype], strict=True):
        expected, lse = reference_attention(*x, **mask, return_logsumexp=True)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-3
        assert out.dtype == dtype and out.transpose(1, 2).is_contiguous() and lse2.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, msg=f"{shape} {mask}")
        torch.testing.assert_close(lse2 * math.log(2), lse, rtol=1e-5, atol=1e-5, msg=f"{shape} {mask}")
        blind = lse == -math.inf
        assert (out[blind] == 0).all() and blind.any() == (shape in [(1, 2, 1, 300, 100, 96), (1, 2, 2, 257, 129, 64),
                                                                    (1, 1, 1, 200, 3, 64), (1, 2, 1, 150, 70, 256)])


def test_any_strides_that_suit_and_values_that_are_not_finite(kit, interpreted):
    given, results = inputs_strided_and_not_finite(kit), interpreted["not finite"]
    transposed, packed = given[:2]
    assert all(hopper._aligned(x) for x in (*transposed, *packed)) and not packed[0].is_contiguous()
    for x, (out, _) in zip(given[:2], results[:2], strict=True):
        torch.testing.assert_close(out, reference_attention(*x, causal=True))
    for x, (out, _) in zip(given[2:], results[2:], strict=True):
        reference = reference_attention(*x, causal=True)
        rows = slice(None) if not x[2].isinf().any() else slice(50, None)  # 0 · ∞ before it, in a tile that has it
        torch.testing.assert_close(out[:, :, rows], reference[:, :, rows], equal_nan=True)
        assert reference.isnan().any() or x[2].isinf().any()


def test_which_tensors_suit():
    def aligned(*shape, dtype=torch.bfloat16):
        return hopper._aligned(torch.empty(*shape, dtype=dtype, device="meta"))

    assert aligned(1, 2, 3, 64) and aligned(2, 3, 5, 40) and not aligned(2, 3, 5, 59) and aligned(1, 1, 1, 59)
    x = torch.empty(2, 4, 6, 64, dtype=torch.float16)
    assert hopper._aligned(x.transpose(1, 2)) and not hopper._aligned(x.mT) and not hopper._aligned(x[..., 1:])
    assert not hopper._aligned(x[:, :1].expand(-1, 4, -1, -1)) and not hopper._aligned(x[..., 4:])
    assert not hopper.suits(x, x, x)  # not on a GPU


def test_each_tile_of_each_head_has_its_turn_once_and_the_last_ones_come_first(interpreted):
    for (programs, heads, tiles, section), found in zip(SIZES, interpreted["places"], strict=True):
        assert sorted(found[found >= 0].tolist()) == list(range(heads * tiles))
        assert (found[:, 0] % tiles).tolist() == [tiles - 1 - i // section for i in range(programs)]


def test_a_causal_mask_gives_each_program_much_the_same(interpreted):
    def most(found):  # tile i sees i + 1 tiles of keys
        work = torch.where(found >= 0, found % 32 + 1, 0).sum(1)
        return (work.max() / work.float().mean()).item()

    in_order = torch.nn.functional.pad(torch.arange(128), (0, 4), value=-1).view(-1, 12).T
    assert most(interpreted["places"][SIZES.index((12, 4, 32, 4))]) < 1.05 and most(in_order) > 1.1


# --- what the compiler makes of it -----------------------------------------------------------------------------------


NAMES = ["bfloat16 d64 full", "bfloat16 d128 causal", "bfloat16 d128 window", "bfloat16 d256 causal",
         "bfloat16 d64 causal specialized", "bfloat16 d128 full specialized", "float16 d128 causal window specialized"]


@pytest.fixture(scope="module")
def reports():
    """The rest of hopper.cases() is the bench's."""
    cases = hopper.cases()
    twice = {f"twice {shared}": Case("kernels_to_compile:rows_counted_twice", {
        "q_ptr": "*bf16:16", "k_ptr": "*bf16:16", "out_ptr": "*fp32:16", "rows": "i32", "SHARED": shared}, 4, 2)
        for shared in (True, False)}
    cases = {name: cases[name] for name in NAMES} | twice
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return dict(zip(cases, compile_cases(cases.values()), strict=True))
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("name", NAMES)
def test_warp_groups_multiply_what_tma_brought_and_nothing_spills(name, reports):
    report = reports[name]
    assert report.faults() == []
    assert report.instructions["HGMMA"] and not report.instructions["HMMA"]
    assert report.instructions["UTMALDG"] >= 3 and not report.instructions["LDG"]
    specialized = "specialized" in name
    assert report.warps == (12 if specialized else 8)  # one group loads, two compute
    assert (report.instructions["USETMAXREG"] > 0) == specialized


def loops(report):
    """The numbers of instructions in loops with matrix products and exponentials, the shortest first."""
    lines = [(int(at, 16), line) for at, line in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*)$", report.sass, re.M)]
    spans = {(int(to, 16), at) for at, line in lines for to in re.findall(r"BRA.*?0x([0-9a-f]+)", line)
             if int(to, 16) < at}
    bodies = [" ".join(line for at, line in lines if begin <= at <= end) for begin, end in spans]
    return sorted(body.count(";") for body in bodies if "HGMMA" in body and "MUFU.EX2" in body)


def test_tiles_that_every_row_sees_have_a_loop_without_a_mask(reports):
    found = {name: reports[f"bfloat16 {name}"] for name in ("d128 causal", "d128 window", "d256 causal")}
    assert [report.instructions["HGMMA"] for report in found.values()] == [2 * 16, 3 * 16, 20]  # at 256 two would spill
    causal, window = loops(found["d128 causal"]), loops(found["d128 window"])
    assert causal[0] < 0.8 * causal[1] and window[0] < 0.7 * window[1]


def second_consumer_counts_twice(report):
    """Whether row numbers of the second consumer begin with a coordinate that has its 64 rows in it already."""
    consumer = report.ttgir.split("partition1(")[1]
    moved = re.findall(r"(%\w+) = arith\.addi %\w+, %c64_i32\w* ", consumer)
    return any(re.search(rf"tt\.splat {re.escape(x)} ", consumer) for x in moved)


def test_the_second_consumer_counts_its_rows_once(reports):
    assert not any(second_consumer_counts_twice(reports[name]) for name in NAMES if "specialized" in name)
    assert not second_consumer_counts_twice(reports["twice False"])
    if triton.__version__ < "3.8":  # the compiler's fault that the kernel steps around is seen
        assert second_consumer_counts_twice(reports["twice True"])
