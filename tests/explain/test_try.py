"""`--try`: a technique is switched on from outside, and what it saved is held against what was promised without it."""

import copy
import re

import pytest

from refimpl import cli
from refimpl.explain import command, switch

SCRIPT = """
import torch
from refimpl.model import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=1024, context_length=128, layers=3, hidden=64, heads=4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    tokens = torch.randint(1024, (8, 129))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
METRIC = """
import outside, torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=32, n_embd=32, n_layer=1, n_head=2))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(512, (4, 32))
    out = model(input_ids=tokens, labels=tokens)
    right = (out.logits.argmax(-1)[:, :-1] == tokens[:, 1:]).float().mean()
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAID = re.compile(r"was ([\d,]+) bytes without it and is ([\d,]+): (-?[\d,]+) bytes saved; (at most )?([\d,]+) were "
                  r"promised, (.*)")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """What the JSON of the script as it is has: a process of its own runs it, once for all tests."""
    path = tmp_path_factory.mktemp("try") / "train.py"
    path.write_text(SCRIPT)
    return {"path": str(path)}


@pytest.fixture
def tried(before, monkeypatch, capsys):
    """A function that runs `explain --try name` and returns (saved, promised, what is said of the promise)."""
    whole = command._without
    def tried(name, change=lambda found: None):
        def without(arguments):
            if "found" not in before:
                before["found"] = whole(arguments)
            found = copy.deepcopy(before["found"])
            change({each["name"]: each for each in found["helps"]})
            return found
        monkeypatch.setattr(command, "_without", without)
        cli.main(["explain", "--try", name, before["path"]])
        was, now, saved, _, promised, verdict = SAID.search(capsys.readouterr().out).groups()
        was, now, saved, promised = (int(n.replace(",", "")) for n in (was, now, saved, promised))
        assert was - now == saved and was == before["found"]["peak of the last step"]
        return saved, promised, verdict
    return tried


@pytest.mark.parametrize("name", ["recompute", "logits", "mlp", "bf16"])
def test_a_promise_is_kept(tried, name):
    saved, promised, verdict = tried(name)
    assert promised > 0 and abs(promised - saved) <= 0.05 * saved and verdict.endswith(" off"), (saved, promised)


@pytest.mark.parametrize("name", ["int8", "autocast"])
def test_a_bound_holds(tried, name):
    saved, promised, verdict = tried(name)
    assert 0 < saved <= promised and verdict == "a bound that holds", (saved, promised)


def test_a_promise_that_is_wrong_is_called_so(tried):
    _, _, verdict = tried("recompute", lambda helps: helps["recompute"].update(saves=2 * helps["recompute"]["saves"]))
    assert verdict.endswith("% off: the promise was wrong")
    _, _, verdict = tried("int8", lambda helps: helps["int8"].update(saves=1))
    assert verdict == "a bound that does not hold"


def test_a_technique_that_does_nothing_is_called_so(tried, monkeypatch):
    """The mutant: it is said to be on, and saves nothing."""
    monkeypatch.setitem(switch.SWITCHES, "recompute", lambda model, stack: None)
    saved, _, verdict = tried("recompute")
    assert saved == 0 and verdict == "100.0% off: the promise was wrong"


def test_a_metric_that_needs_logits_is_said_to_be_what_the_technique_costs(tmp_path, monkeypatch, capsys):
    """The script's own error is written, and the last line says which technique made it one."""
    path = tmp_path / "train.py"
    path.write_text(METRIC)
    monkeypatch.setattr(command, "_without", lambda arguments: {"peak": 1})
    with pytest.raises(SystemExit) as done:
        cli.main(["explain", "--try", "logits", str(path)])
    said = capsys.readouterr()
    assert done.value.code == 1 and "out.logits.argmax(-1)" in said.err
    assert "The script, which runs without it, failed: " in said.out
    assert said.out.strip().endswith("What it costs: no logits for metrics")


def test_what_cannot_be_switched_on_says_why(before, monkeypatch, capsys):
    monkeypatch.setattr(command, "_without", lambda arguments: {})
    cli.main(["explain", "--try", "attention", before["path"]])
    assert "not switched on (attention in tiles): GPT takes no other attention from outside" in capsys.readouterr().out
