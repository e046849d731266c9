"""The cases of the table of tile sizes, and what the compiler says of them."""

import re

import pytest
import torch
import triton
from compiling import Reports

from benchmarks.compiler import table
from benchmarks.compiler.processes import compile_all
from benchmarks.compiler.table import Name, cases
from refimpl.attention.kernels.configs import KERNELS, TABLE, Config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPILLS = Name("forward", "datacenter", BF16, 128, "full")  # with 4 warps for a tile of 128 × 128

# What is known to be short of the rest: remarks of ptxas, and by Triton's version bytes spilled.
REMARKS = {(kernel, "dropout"): ["C7515"] for kernel in ("forward", "dq")}
SPILLED_BY = {
    "3.6": {Name("dkdv", "datacenter", BF16, 256, "packed"): 32},
    "3.7": {Name("dkdv", "datacenter", BF16, 256, "packed"): 16, Name("dkdv", "any", FP32, 64, "causal"): 8},
}
SPILLED = SPILLED_BY.get(".".join(triton.__version__.split(".")[:2]), {})


def chosen():
    """Which of the table's 135 are compiled here: each entry, and each variant at some of them. All are the bench's."""
    hopper = {"chips": ["datacenter"], "dtypes": [BF16]}
    return {
        **cases(**hopper, variants=["full", "causal"]),
        **cases(**hopper, head_dims=[64], variants=["window"]), **cases(**hopper, head_dims=[128], variants=["packed"]),
        **cases(**hopper, head_dims=[128], variants=["dropout"]),
        **cases(chips=["datacenter"], dtypes=[FP16], head_dims=[64], variants=["causal"]),
        **cases(chips=["any"], variants=["causal"]), **{name: table.case(name) for name in SPILLED}}


MUTANT = table.case(SPILLS, Config(128, 128, 4, 2))


@pytest.fixture(scope="module")
def reports(request):
    return Reports({**chosen(), "mutant": MUTANT}, request)


@pytest.mark.parametrize("name", chosen(), ids=str)
def test_what_the_compiler_makes_of_it(name, reports):
    found = reports[name]
    remarks = re.findall(r"\((C75\d\d)\)", "".join(found.warnings))
    assert (remarks, found.spill_bytes) == (REMARKS.get((name.kernel, name.variant), []), SPILLED.get(name, 0))
    assert (found.faults() == []) == (remarks == [] and name not in SPILLED)
    assert 0 < found.shared_bytes <= found.shared_limit == {"datacenter": 232448, "any": 101376}[name.chip]
    assert found.warps == table.config_of(name).num_warps
    products = {"HGMMA": name.chip == "datacenter", "HMMA": name.chip == "any" and name.dtype != FP32}
    assert {which: found.instructions[which] > 0 for which in products} == products
    assert name.dtype != FP32 or found.instructions["FFMA"] > 500  # fp32 by fp32's own units, not in tf32


def test_a_tile_known_to_spill_is_found_at_fault(reports):
    mutant = reports["mutant"]
    assert mutant.spill_bytes > 500 and "spills" in mutant.faults()[-1]


def test_a_case_for_each_entry_kernel_and_variant():
    everything = cases()
    assert len(everything) == len(TABLE) * len(KERNELS) * len(table.VARIANTS) == 135
    assert len(set(map(str, everything))) == 135
    assert cases(chips=["any"], dtypes=[BF16], head_dims=[64], kernels=["dq"], variants=["full"]) == {
        Name("dq", "any", BF16, 64, "full"): table.case(Name("dq", "any", BF16, 64, "full"))}
    for name, case in everything.items():
        assert case.options["target"] == table.TARGETS[name.chip] and case.arguments["D"] == name.head_dim
        assert (case.arguments["dropout"] is not None) == (name.variant == "dropout")
        assert (case.arguments["packed"] is not None) == (name.variant == "packed")
        assert (case.arguments["band"].left is not None) == (name.variant == "window")


def test_one_that_does_not_compile_is_named_and_the_others_are_there():
    absent = MUTANT._replace(kernel="refimpl.attention:no_such")
    reports = dict(compile_all({"absent": absent, "mutant": MUTANT, "other": table.case(SPILLS)}))
    assert isinstance(reports["absent"], RuntimeError) and "no_such" in str(reports["absent"])
    assert reports.keys() == {"absent", "mutant", "other"}
    assert reports["mutant"].registers > 0 and reports["other"].registers > 0
