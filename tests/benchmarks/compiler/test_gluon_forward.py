"""The forward in Gluon: what the compiler makes of it. Its steps: tests/attention. On a GPU: tests/gpu."""

import re

import pytest

from benchmarks.compiler import gluon_forward
from benchmarks.compiler.processes import compile_cases

NAMES = ["bfloat16 d64 causal", "bfloat16 d128 full", "bfloat16 d128 causal", "float16 d128 window"]


@pytest.fixture(scope="module")
def reports():
    """The rest of gluon_forward.cases() is the bench's."""
    cases = gluon_forward.cases()
    return dict(zip(NAMES, compile_cases([cases[name] for name in NAMES]), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_warp_groups_multiply_what_tma_brought_and_nothing_spills(name, reports):
    report = reports[name]
    assert report.faults() == [] and report.warps == 12
    assert report.instructions["HGMMA"] and not report.instructions["HMMA"]
    assert report.instructions["UTMALDG"] >= 4 and report.instructions["UTMASTG"] == 2
    assert not report.instructions["LDG"] and report.instructions["USETMAXREG"]


@pytest.mark.parametrize("name", NAMES)
def test_exponentials_run_beside_a_product(name, reports):
    """Between the wait for all products but one and the wait for that one, in each consumer's loop without masks."""
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])", reports[name].sass)
    beside = [code.count("MUFU.EX2") for outstanding, code in zip(waits[1::2], waits[2::2], strict=True)
              if outstanding == "0x1"]
    assert len([count for count in beside if count >= 64]) == 2, beside  # 64 · 128 scores of 128 threads
