"""`--until step N` of a long run: only the last steps are recorded, and what is there by then is met."""

import textwrap

import pytest

from refimpl import cli
from refimpl.explain import Explanation, Script, run, script_run

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


def at(path, text, steps, after):
    path.write_text(text)
    made = run(Script(path), steps, after=after)
    assert made.done, made.ending.text
    return Explanation(made)


def test_it_reads_what_a_recording_from_the_start_reads(tmp_path):
    whole, late = (at(tmp_path / "train.py", KEEPS, 12, after) for after in (0, 9))
    assert late.timeline.last_peak == whole.timeline.last_peak
    assert len(late.trace.ops) < len(whole.trace.ops) / 3
    assert late.run.words == whole.run.words == "12 steps of AdamW, 12 steps of SGD, then ended"
    assert [str(each) for each in late.grows] == [str(each) for each in whole.grows]
    assert [each.nbytes for each in late.grows] == [each.nbytes for each in whole.grows]
    kept = {each.holder: each.nbytes for each in late.kept}
    assert kept["`held`"] == 3000 * 4 and "`held`" in {each.holder for each in whole.kept}
    assert late.trace.start["parameters"] == 4 * (64 * 256 + 256 + 256 * 8 + 8)  # older, and known by their modules
    assert any("end of step 9" in note for note in late.notes)


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
