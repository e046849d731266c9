"""Each kind of kernel compiled for sm_80, the oldest chip that the tables of tile sizes are for."""

import pytest
import torch
from compiling import Reports

from benchmarks.compiler import cross_entropy, quantized, scores, small, table
from benchmarks.compiler.compiled import SHARED_BYTES

BF16, FP32 = torch.bfloat16, torch.float32
SM_80 = {"target": ("cuda", 80)}


def on_sm_80(named):
    """The cases of any chip, for sm_80: {text: Case}."""
    return {str(name): case._replace(options=SM_80) for name, case in named.items() if str(name).endswith(" any")}


CASES = {
    **on_sm_80(table.cases(chips=["any"], dtypes=[BF16], variants=["causal", "packed"])),
    **on_sm_80(table.cases(chips=["any"], dtypes=[FP32], variants=["full"])),
    **on_sm_80(cross_entropy.cases(["any"])), **on_sm_80(quantized.cases(["any"])), **on_sm_80(small.cases("any")),
    **on_sm_80(scores.cases(("d64 softcap", "d128 prefix packed"), "any"))}


@pytest.fixture(scope="module")
def reports(request):
    return Reports(CASES, request)


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_for_sm_80(name, reports):
    report = reports[name]
    assert report.registers > 0 and not report.instructions["HGMMA"], "that is Hopper's"
    assert 0 <= report.shared_bytes <= SHARED_BYTES[86], "a tile of any chip fits the smallest"


def test_each_kind_of_kernel_is_among_them():
    kinds = {name.partition(",")[0] for name in CASES}
    assert len(CASES) > 30 and {"forward", "dkdv", "dq"} < kinds and len(kinds) > 6, kinds
