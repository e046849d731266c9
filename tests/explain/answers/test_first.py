"""What is said first: the cause that the maintainers found, with its line; nothing of 0 %; refusals when asked for."""

import pytest
from explain_kit import HELD_BACK, PROGRAMS, explained

from refimpl.explain import Explanation, Script, run
from refimpl.explain.answers.dead import target
from refimpl.memory.storage_records import Line

# program: (the cause in words, its line's text), of those whose cure is held beside
CAUSES = {
    "replay_buffer": ("grows by 677,412 bytes a step", "state"),  # made on a device, else a clone
    "input_gradients": ("`.grad` of `photos[…]`", "f = net(x)"),
    "graph": ("70% of the peak", "weight = self.edge_net(features)"),
    "log_probabilities": ("by _log_softmax, float32 (4, 127, 16384)", "log_softmax(logits, -1)"),
    "shared_layer": ("95% of the peak", "x = self.linear(x)"),
    "compiled": ("of the peak, are made at", ".sum().backward()"),
}
COMPILED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

model = torch.compile(nn.Sequential(*(Block() for _ in range(4))), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.randn(512, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("graph", "replay_buffer") else
                                               pytest.mark.nightly) for name in CAUSES])
def test_the_cause_is_among_the_first_three(name):
    found = Explanation(run(Script(PROGRAMS / f"{name}.py")))
    words, text = CAUSES[name]
    assert any(words in each.what and any(text in line.text for line in each.lines) for each in found.first)
    for number, what in enumerate(dict.fromkeys(each.what.split("\n")[0] for each in found.first), 1):
        assert f"\n  {number}. {what}\n" in str(found)
    assert [each["what"] for each in found.as_dict()["first"]] == [each.what for each in found.first]
    assert not [each for each in found.answers if each.name == "copy"], "a target network has batches of its own"


def test_no_row_saves_nothing_and_refusals_are_behind_all(tmp_path):
    found = explained(tmp_path / "script.py", HELD_BACK)
    short, whole = found.text(), found.text(everything=True)
    assert "  0%" not in short and "nothing: " not in short and "others: --all says why" in short
    refused = [each for each in found.helps if not each.saves]
    assert len(refused) > 5 and all(f"nothing: {each.title} ({each.why})" in whole for each in refused)


def test_blocks_of_a_compiled_model_are_found(tmp_path):
    helps = {each.name: each for each in explained(tmp_path / "script.py", COMPILED).helps}
    assert helps["recompute"].why.startswith("4 blocks, as _orig_mod.0, are compiled into one graph")


@pytest.mark.parametrize(("text", "name"), [
    ("loaded = torch.load(path)", "loaded"), ("    a, b = f(x), g(y)", "a, b"), ("x: torch.Tensor = f()", "x"),
    ("for batch in loader:", "batch"), ("for i, (x, y) in enumerate(data):", "i, (x, y)"),
    ("self.out = f(x=1)", "self.out"), ("trainer.train(x=1)", None),
    ("return f(a, b=2)", None), ("assert a == b", None), ("", None)])
def test_the_variable_of_a_line(text, name):
    assert target(Line("script.py", 1, text)) == name


def test_a_script_that_was_edited_shows_its_new_lines(tmp_path):
    explained(tmp_path / "script.py", HELD_BACK)
    found = explained(tmp_path / "script.py", HELD_BACK, (("out = model", "held = model"), ("(out -", "(held -")))
    assert any("`del held`" in each.change for each in found.answers)


TURNS = """
import torch
from torch import nn

nets = [nn.Linear(256, 256) for _ in range(2)]
optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
for step in range(8):
    for turn, (net, optimizer) in enumerate(zip(nets, optimizers)):
        net(torch.randn(1024 * (1 + 2 * step + turn), 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_optimizers_that_take_turns_are_all_used(tmp_path):
    """Batches grow, so that the peak is in the last step, of one of them: the other's states had their turn before."""
    found = explained(tmp_path / "script.py", TURNS)
    assert found.timeline.peak_row > found.timeline.steps[-1][0]
    assert not [each for each in found.answers if each.name == "unused"]


LAST = """
import torch
from torch import nn

net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    large = torch.randn(512, 512)
    twice = (large * 2).sum().item()
    net(torch.full((1, 8), twice)).mean().backward()
    optimizer.step()
    large = None
"""


def test_what_the_peak_itself_reads_is_not_dead(tmp_path):
    found = explained(tmp_path / "script.py", LAST)
    assert found.moment.operation == "mul" and found.timeline.peak > 2 * 512 * 512 * 4
    assert not [each for each in found.answers if each.name == "del"]
