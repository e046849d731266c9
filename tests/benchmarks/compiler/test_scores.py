"""The attention kernels with hooks, sinks and MLA's head_dims, as the compiler makes them: no spill, and HGMMA."""

import pytest
from compiling import Reports

from benchmarks.compiler import scores
from refimpl.attention.kernels.configs import Config

CHOSEN = ("forward, bfloat16, d128 softcap, datacenter", "dkdv, bfloat16, d64 documents, datacenter",
          "dq, bfloat16, d128 prefix, datacenter", "forward, bfloat16, d64 sinks, datacenter",
          "dkdv, bfloat16, d192 v128, datacenter", "dkdv, bfloat16, d128 prefix packed, datacenter",
          "dq, bfloat16, d128 softcap documents, datacenter")
LARGE = "dkdv, bfloat16, d256 softcap window, datacenter"


def by_warps_of_four(kernel, variant, config):
    """The mutant: half of the warps for a tile twice as long."""
    return Config(128, 128, 4, 2)


@pytest.fixture(scope="module")
def reports(request):
    mutant = scores.cases(("d128 softcap",), change=by_warps_of_four)[CHOSEN[0]]
    return Reports(scores.cases() | {"mutant": mutant}, request)


@pytest.mark.parametrize("name", CHOSEN)
def test_what_the_compiler_makes_of_it(name, reports):
    found = reports[name]
    assert found.faults() == [] and found.spill_bytes == 0 and found.warnings == ()
    assert found.instructions["HGMMA"] and not found.instructions["HMMA"]


def test_two_accumulators_of_256_columns_leave_a_hook_a_few_registers_too_few(reports):
    """16 bytes in Triton 3.7, none in 3.6: a store and a load of two registers."""
    found = reports[LARGE]
    assert found.spill_bytes <= 32 and found.warnings == () and found.instructions["HGMMA"]


def test_a_tile_too_large_is_found_at_fault(reports):
    assert reports["mutant"].spill_bytes > 500


def test_a_case_for_each_kernel_and_variant():
    named = scores.cases()
    assert len(named) == sum(1 if variant.sinks else 3 for variant in scores.VARIANTS.values())
    assert {LARGE, *CHOSEN} <= set(named)
    assert (named[CHOSEN[4]].arguments["D"], named[CHOSEN[4]].arguments["V"]) == (192, 128)
    for name, case in named.items():
        given = case.arguments
        score = given["score"]._asdict()
        for word, field in (("softcap", "softcap"), ("alibi", "slopes"), ("documents", "documents"),
                            ("prefix", "prefix")):
            assert (score[field] is not None) == (word in name), name
        assert (score["any"] is None) == ("sinks" in name or "v128" in name)
        assert (given.get("sinks") is not None) == ("sinks" in name)
        assert (given["packed"] is not None) == ("packed" in name)
        assert (given["band"].left is not None) == ("window" in name)
