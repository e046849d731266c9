"""The bench of compiled kernels on a few of them: what a row tells, and that it names what does not compile."""

import sys
import types

import pytest
import torch

from benchmarks import __main__, kernels
from benchmarks.compiler import table
from refimpl.attention.kernels.configs import Config

NAME = table.Name("forward", "datacenter", torch.bfloat16, 128, "causal")


@pytest.fixture(scope="module")
def ran():
    case = table.case(NAME)
    spilling = table.case(NAME, Config(128, 128, 4, 2))
    named = {NAME: case, "hopper, spilling": spilling, "absent": case._replace(kernel="no.such:one")}
    settings, rows = kernels.run("cpu", named)
    return settings, list(rows)


def test_a_row_tells_what_bounds_a_kernel(ran):
    settings, (fine, spilling, _) = ran
    assert settings["ptxas"].count(".") == 2 and settings["targets"] == {"datacenter": "sm_90", "any": "sm_86"}
    assert fine["what"] == "forward, bfloat16, d128, causal, datacenter" and fine["peer_value"] == 232448
    assert 0 < fine["value"] < 232448 and fine["unit"] == "bytes" and 64 < fine["registers"] <= 255
    assert (fine["kernel"], fine["dtype"], fine["head_dim"], fine["variant"]) == ("forward", "bfloat16", 128, "causal")
    assert (fine["block_m"], fine["block_n"], fine["num_warps"], fine["num_stages"]) == table.config_of(NAME)
    assert fine["instructions"]["HGMMA"] and not fine["instructions"]["HMMA"] and not fine["remarks"]
    assert fine["faults"] == fine["spill_bytes"] == 0 and f"{fine['registers']} registers, 0 bytes" in fine["note"]
    assert spilling["spill_bytes"] > 500 and spilling["faults"] and spilling["kernel"] == "hopper"
    assert "C75" in spilling["note"]


def test_what_does_not_compile_has_a_row_and_the_table_shows_it(ran):
    _, rows = ran
    assert rows[2]["value"] is None and "No module named 'no'" in rows[2]["error"]
    lines = __main__.table(rows).splitlines()
    assert "did not compile: " in lines[3] and lines[1].endswith(rows[0]["note"])


def test_all_there_are_and_a_module_that_this_triton_lacks(monkeypatch):
    def cases():
        raise AttributeError("module 'gluon' has no 'tma'")

    monkeypatch.setitem(sys.modules, "benchmarks.compiler.own", types.SimpleNamespace(cases=lambda: {"d64": 1}))
    monkeypatch.setitem(sys.modules, "benchmarks.compiler.old", types.SimpleNamespace(cases=cases))
    monkeypatch.setattr(kernels, "MODULES", ("own", "old"))
    named, missing = kernels.every_case()
    assert named == {**table.cases(), "own, d64": 1}
    assert [(row["what"], row["error"]) for row in missing] == [("old", "module 'gluon' has no 'tma'")]
