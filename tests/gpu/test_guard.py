"""The programs of tests/kits on PyTorch's allocator: what only it can tell, and lines that a CPU does not know."""

import importlib.util
import pickle
import re
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("programs", Path(__file__).parents[1] / "guard" / "test_programs.py")
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)

pytestmark = pytest.mark.bytes
PROGRAMS = [
    ("losses", "growth", "the graph of `kept[…]` of losses()"),
    ("hook", "growth", "held by `outputs`"),
    ("predictions", "predictions", "held by `predicted` of evaluate()"),
    ("longest", "longest batch", "8 rows of 1,024, and the longest before had 192"),
    ("second_model", "second model", "a second model, Sequential, that nothing updates"),
    ("save", "save", "a copy of the state is made beside it"),
    ("foreach", "update", "AdamW updates all parameters at once"),
    ("data_set", "kept", "held by `data` of data_set()"),
    ("recomputation", "recomputation", "LlamaModel) are in eval()"),
    ("fragmentation", "fragmentation", "MiB are free, the largest piece has"),
    ("other_process", "others", "of the device are of others"),
]


@pytest.mark.parametrize(("name", "cause", "words"), PROGRAMS)
def test_the_cause_is_named_with_its_line_and_its_cure_lets_the_program_pass(name, cause, words, tmp_path):
    failed, report = programs.run(name, tmp_path / "oom"), programs.report_of(tmp_path / "oom")
    first = report["causes"][0]
    promised = re.match(r"PYTORCH_ALLOC_CONF=(\S+) lets", first["cure"])
    conf = {"PYTORCH_CUDA_ALLOC_CONF": promised[1]} if promised else {}
    assert bool(promised) == (name == "fragmentation")
    passed = programs.run(name, tmp_path / "cured", "cured", **conf)
    assert failed.returncode == 1 and first["name"] == cause and words in first["what"], (failed.stderr, report)
    assert "guard_programs.py:" in first["line"]
    assert passed.returncode == 0 and not list((tmp_path / "cured").glob("*failure*")), passed.stderr
    assert sum(report["live"]["ledger"].values()) == report["device"]["requested"]
    assert any("guard_programs.py:" in line for line, *_ in report["live"]["lines"])
    snapshot = pickle.loads((tmp_path / "oom" / "rank0.failure1.pickle").read_bytes())
    assert snapshot["device_traces"][0][-1]["action"] == "oom"
