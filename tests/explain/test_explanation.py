"""The example that README shows: its figures are those of a run."""

from pathlib import Path

from explain_kit import explained

from refimpl.explain import Explanation, Script, run

ROOT = Path(__file__).parents[2]


def test_readme_shows_what_explain_says():
    explanation = Explanation(run(Script(ROOT / "examples" / "train_small.py")))
    said = str(explanation)
    shown = (ROOT / "README.md").read_text().partition("$ refimpl explain examples/train_small.py\n")[2]
    lines = [line for line in shown.partition("```")[0].splitlines() if "…" not in line]
    assert len(lines) > 10 and [line for line in lines if line not in said.splitlines()] == []
    assert explanation.as_dict()["peak"] == explanation.trace.peak.total
    modules = dict(explanation.top("module"))
    assert modules["blocks.*.mlp.up  × 4"] > 4 * 2048 * 768 * 4, "activations, gradients and states of four layers"
    assert sum(dict(explanation.top("line")).values()) == explanation.moment.ledger.total


NOTED = """
import torch
from safetensors.torch import load_file, save_file

large = torch.zeros(10_000)
del large
save_file({"weight": torch.zeros(8, 8)}, "weights.safetensors")
model = torch.nn.Linear(8, 8, bias=False)
model.load_state_dict(load_file("weights.safetensors"), assign=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_peak_while_building_and_a_mapped_file_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = explained(tmp_path / "script.py", NOTED)
    notes = "\n".join(found.notes)
    assert str(found) == found.text(everything=False) != found.text(everything=True)
    assert "building the model took more, 40,000 bytes, after zeros" in notes
    assert "256 bytes of the peak, loaded at script.py:9, are safetensors' file, mapped" in notes
