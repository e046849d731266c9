"""Each of the programs that run out of memory is told its cause and line, and passes with the cure switched on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import guard_programs
import pytest

PROGRAMS = [  # name, the first cause, a part of its line, a part of what is said
    ("losses", "growth", "guard_programs.py", "the graph of `kept[…]` of losses()"),
    ("hook", "growth", "guard_programs.py", "held by `outputs`"),
    ("predictions", "predictions", "logits = model(batch(16, 64))", "held by `predicted` of evaluate()"),
    ("longest", "longest batch", "return cross_entropy", "8 rows of 1,024, and the longest before had 192"),
    ("second_model", "second model", "", "a second model, Sequential, that nothing updates"),
    ("save", "save", "copies = [copy.deepcopy(state)", "a copy of the state is made beside it"),
    ("foreach", "update", "optimizer.step()", "AdamW updates all parameters at once"),
    ("data_set", "kept", "", "held by `data` of data_set()"),
    ("recomputation", "recomputation", ".loss.backward()", "LlamaModel) are in eval()"),
]


def run(name, folder, *cured, **environment):
    return subprocess.run([sys.executable, guard_programs.__file__, name, str(folder), *cured], text=True, timeout=200,
                          capture_output=True, env={**os.environ, **environment})


def report_of(folder):
    return json.loads((Path(folder) / "rank0.failure1.json").read_text())


@pytest.mark.parametrize(("name", "cause", "line", "words"), PROGRAMS)
def test_the_cause_is_named_and_its_cure_lets_the_program_pass(name, cause, line, words, tmp_path):
    failed, passed = run(name, tmp_path / "oom"), run(name, tmp_path / "cured", "cured")
    report = report_of(tmp_path / "oom")
    first = report["causes"][0]
    assert failed.returncode == 1 and first["name"] == cause and words in first["what"], (failed.stderr, report)
    assert line in f"{first['line']} {report['line']}" and first["cure"]
    assert f"refimpl guard: {first['what']}; {tmp_path / 'oom'}" in failed.stderr  # the note, behind PyTorch's error
    assert passed.returncode == 0 and not list((tmp_path / "cured").glob("*failure*")), passed.stderr
