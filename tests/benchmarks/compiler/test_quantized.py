"""The block codec's kernels compiled for an H100, which need not be here: no spills, loads of 16 bytes."""

import re

from benchmarks.compiler import quantized
from benchmarks.compiler.processes import compile_each


def test_kernels_for_an_h100():
    named = quantized.cases()
    assert len(named) == 2 * 3 * 2
    for name, compiled in zip(named, compile_each(named.values()), strict=True):
        assert compiled.faults() == [], name
        assert compiled.registers <= 128 and compiled.instructions["HMMA"] == 0, (name, compiled.registers)
        wide = re.findall(r"LDG\.E\.128|STG\.E\.128|LDG\.E\.64|STG\.E\.64", compiled.sass)
        assert wide, name
