"""The block-sparse kernels as the compiler makes them, of sm_90 and sm_80: no spill, but for two that are named."""

import pytest
from compiling import Reports

from benchmarks.compiler import block_sparse
from refimpl.attention.kernels.configs import Config

CASES = {name: case if name.endswith("datacenter") else case._replace(options={"target": ("cuda", 80)})
         for name, case in block_sparse.cases(hooks=("",)).items()}
SPILLS = {"sparse dkdv, bfloat16, d256, datacenter", "sparse dq, bfloat16, d64, any"}  # 24 bytes each by Triton 3.7


@pytest.fixture(scope="module")
def reports(request):
    mutant = block_sparse.cases(change=lambda config: Config(128, 128, 4, 1))["sparse dkdv, bfloat16, d128, any"]
    return Reports(CASES | {"mutant": mutant}, request)


def test_both_chips_and_both_dtypes_are_there():
    assert len(CASES) == 27 and {case.options["target"][1] for case in CASES.values()} == {90, 80}


@pytest.mark.parametrize("name", [name if "bfloat16, d128" in name or name in SPILLS else
                                  pytest.param(name, marks=pytest.mark.nightly) for name in CASES])
def test_what_the_compiler_makes_of_it(name, reports):
    found = reports[name]
    assert found.warnings == () and found.shared_bytes <= found.shared_limit
    assert found.spill_bytes <= (32 if name in SPILLS else 0)
    assert bool(found.instructions["HGMMA"]) == name.endswith("datacenter")


def test_a_tile_too_large_is_found_at_fault(reports):
    assert reports["mutant"].faults()
