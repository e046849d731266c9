"""The example that README shows: its figures are those of a run."""

from pathlib import Path

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
