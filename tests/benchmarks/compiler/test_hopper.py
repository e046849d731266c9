"""The forward for Hopper: what the compiler makes of it. Its values: tests/attention."""

import re

import pytest
import triton
from compiling import Reports

from benchmarks.compiler import hopper
from benchmarks.compiler.compiled import Case

NAMES = ["bfloat16 d64 full", "bfloat16 d128 causal", "bfloat16 d128 window", "bfloat16 d256 causal",
         "bfloat16 d64 causal specialized", "bfloat16 d128 full specialized", "float16 d128 causal window specialized"]


@pytest.fixture(scope="module")
def reports(request):
    twice = {f"twice {shared}": Case("kernels_to_compile:rows_counted_twice", {
        "q_ptr": "*bf16:16", "k_ptr": "*bf16:16", "out_ptr": "*fp32:16", "rows": "i32", "SHARED": shared}, 4, 2)
        for shared in (True, False)}
    return Reports(hopper.cases() | twice, request)


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
