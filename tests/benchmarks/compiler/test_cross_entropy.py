"""The head's kernels compiled for an H100, which need not be here: tensor cores, no spills."""

from benchmarks.compiler import cross_entropy
from benchmarks.compiler.processes import compile_each


def test_kernels_for_an_h100():
    named = {name: case for name, case in cross_entropy.cases(["datacenter"]).items() if "bfloat16" in name}
    assert len(named) == 9
    for name, compiled in zip(named, compile_each(named.values()), strict=True):
        assert compiled.instructions["HGMMA"] > 0 and compiled.instructions["HMMA"] == 0, name
        assert compiled.faults() == [], name


def test_each_entry_has_its_cases():
    names = cross_entropy.cases(change=lambda kernel, config: config._replace(block_k=16))
    assert len(names) == 3 * 3 * 3 and {case.arguments["K"] for case in names.values()} == {16}
