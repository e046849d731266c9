"""`--until step N` of a long run: only the last steps are recorded, and what is there by then is met."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from refimpl import cli
from refimpl.explain import Explanation, Script, run, script_run

ROOT = Path(__file__).parents[2]
KEEPS = """
import torch
from torch import nn

torch.manual_seed(0)
model, other = nn.Linear(64, 256), nn.Linear(256, 8)
data, kept, held = torch.randn(500, 64), [], torch.zeros(3000)
optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)]
held.untouched = torch.ones(700)
for step in range(30):
    out = other(model(torch.randn(32, 64)).relu())
    loss = out.square().sum()
    loss.backward()
    kept.append(model(data[:32]).sigmoid())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


def read(folder, *options):
    """What the JSON of a process of its own has: what other tests have left in this one would be there."""
    (folder / "train.py").write_text(KEEPS)
    command = [sys.executable, "-m", "refimpl", "explain", *options, "--out", "report", "train.py"]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return json.loads((folder / "report" / "explain.json").read_text())


def test_it_reads_what_a_recording_from_the_start_reads(tmp_path):
    whole, late = read(tmp_path, "--steps", "12"), read(tmp_path, "--until", "step", "12")
    assert late["ending"] == whole["ending"] == "12 steps of AdamW, 12 steps of SGD, then ended"
    for name in ("peak", "peak of the last step", "grows", "parameters"):
        assert late[name] == whole[name], name
    assert "`kept[…]`" in late["grows"][0]["holder"]
    kept = [{each["holder"]: each["bytes"] for each in found["kept"]} for found in (late, whole)]
    assert kept[0]["`held`"] == kept[1]["`held`"] == 3000 * 4
    assert any("end of step 9" in note for note in late["notes"])
    assert not any("end of step" in note for note in whole["notes"])


def test_it_may_end_before(tmp_path):
    (tmp_path / "train.py").write_text(KEEPS.replace("range(30)", "range(8)"))
    assert "it ended before the recording began" in Explanation(run(Script(tmp_path / "train.py"), 12, after=9)).text()


def test_a_mode_that_is_open_would_be_closed_in_place_of_ours(tmp_path):
    head, loop, body = KEEPS.partition("for step")
    counted = "from torch.utils.flop_counter import FlopCounterMode\nwith FlopCounterMode(display=False):\n"
    (tmp_path / "train.py").write_text(head + counted + textwrap.indent(loop + body, "    "))
    made = run(Script(tmp_path / "train.py"), 12, after=9)
    assert not made.done and "RuntimeError: a TorchDispatchMode is open at step 9" in Explanation(made).text()


def test_the_command_records_the_last_steps_of_many(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text(KEEPS)
    monkeypatch.setattr(script_run, "MOST", 400)  # too few for twelve steps
    cli.main(["explain", "--until", "step", "12", str(tmp_path / "train.py")])
    assert "12 steps of AdamW" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["explain", "--steps", "12", str(tmp_path / "train.py")])
    assert "ask for the last few of them by `--until step N`" in capsys.readouterr().err
