"""The kernels without a table, as the compiler makes them: no spill, and the two with 16-bit products have HGMMA."""

from benchmarks.compiler import small
from benchmarks.compiler.processes import compile_each


def test_kernels_for_an_h100():
    named = small.cases()
    fewer = small.cases(warps=2)["paper_triton, bfloat16, d128, datacenter"]  # the mutant
    *found, mutant = compile_each([*named.values(), fewer])
    assert len(named) == 5 and mutant.spill_bytes > 500
    for name, compiled in zip(named, found, strict=True):
        assert compiled.faults() == [], name
        assert (compiled.instructions["HGMMA"] > 0) == name.startswith("paper_triton"), name
