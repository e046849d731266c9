"""Each plain answer, done by hand: the script that was changed as it says takes as many bytes less as it says."""

from typing import NamedTuple

import pytest
from explain_kit import HELD_BACK, PROGRAMS, explained, held

from refimpl.explain.answers import dead
from refimpl.explain.answers.first import WORTH


class Cured(NamedTuple):
    """A program, what is changed in it by hand, and parts of what is said. `before`: changes in both."""

    program: str
    changes: tuple
    words: str
    before: tuple = ()
    change: str = ""


FROZEN = """
import torch
from torch import nn

torch.manual_seed(0)
base = nn.Linear(1024, 1024).requires_grad_(False)
head = nn.Linear(1024, 8)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(4, 1024)
    head(base(x)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAVED = """
import io
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(4, 512)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, io.BytesIO())
    moved = {name: tensor.double() for name, tensor in state.items()}
    torch.save(moved, io.BytesIO())
    del state, moved
"""
PICTURES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAZILY = (("a, b, c = build(), build(), build()\n", ""),
          ("(a, torch.optim.SGD(a.parameters(), lr=0.1))", "lambda m: torch.optim.SGD(m.parameters(), lr=0.1)"),
          ("(b, torch.optim.AdamW(b.parameters()))", "lambda m: torch.optim.AdamW(m.parameters())"),
          ("(c, torch.optim.AdamW(c.parameters(), foreach=True))", "lambda m: None"),
          ("for model, optimizer in", "for make in"),
          ("    run(model, optimizer)", "    model = build()\n    run(model, make(model))\n    del model"))
NO_MASK = (("    same = (document[:, None] == document[None]).tril()\n", ""),
           ("    mask = torch.zeros(same.shape).masked_fill(~same, float(\"-inf\"))[None, None]\n", ""),
           ("position_ids=position, attention_mask=mask, ", ""))
CURES = {
    "foreach": Cured("foreach", (("foreach=True", "foreach=False"),), "temporaries of AdamW, which updates all"),
    "fused": Cured("foreach", (("foreach=True", "fused=True"),), "temporaries of AdamW, which updates all"),
    "sparse": Cured("embedding_bags", (("sparse=SPARSE", "sparse=True"),), "whole gradients of embedding tables"),
    "mask": Cured("dense_mask", NO_MASK, "masks of tokens × tokens"),
    "predictions": Cured("evaluated", (("report_to=", "prediction_loss_only=True, report_to="),),
                         "what evaluation keeps", before=(("Rows(1024)", "Rows(192)"),),
                         change="`prediction_loss_only=True`"),
    "unread": Cured("resumed", (("    for _ in range(20)", "    del loaded\n    for _ in range(20)"),),
                    "held by `loaded` of main()", change="let go of `loaded`"),
    "unused": Cured("three_in_turn", LAZILY, "no later step here uses them"),
    "collect": Cured("copies_at_saving", (("if step % 2: ", ""),), "refer to each other", before=(
        ("import copy\n", "import copy\nimport gc\n\ngc.disable()\n"),
        ("average.checkpoint(folder, step)", "average.checkpoint(folder, step)\n        if step % 2: gc.collect()"))),
    "copy": Cured("preferences", (("reference = copy.deepcopy(policy).eval().requires_grad_(False)",
                                   "reference = policy"),), "a frozen copy of a model that trains"),
    "del": Cured(HELD_BACK, (("    loss.backward()", "    del out\n    loss.backward()"),), "nothing reads",
                 change="`del out`"),
    "upcast": Cured(FROZEN, (("requires_grad_(False)", "requires_grad_(False).bfloat16()"),
                             ("base(x)", "base(x.bfloat16()).float()")), "frozen weights in 32 bits"),
    "saved": Cured(SAVED, (("tensor.clone()", "tensor"), ("tensor.double()", "tensor")), "made to be saved"),
    "resolution": Cured(PICTURES, (("64, 64", "32, 32"),), "images of 64 × 64", change="images of 32 × 32"),
}


@pytest.mark.parametrize("name", CURES)
def test_an_answer_saves_what_it_says(tmp_path, name):
    case = CURES[name]
    text = case.program if "\n" in case.program else (PROGRAMS / f"{case.program}.py").read_text()
    found = explained(tmp_path / "script.py", text, case.before)
    [answer] = [each for each in found.answers if each.name == name]
    assert case.words in answer.what and case.change in answer.change
    assert answer in found.first or answer.saves < WORTH * found.timeline.peak
    cured = explained(tmp_path / "cured.py", text, case.before + case.changes)
    saved = found.timeline.peak - cured.timeline.peak
    assert held(answer.saves, saved) or (answer.bound and saved <= answer.saves < 1.1 * saved), (answer, saved)
    assert name == "resolution" or sum(each.saves for each in cured.answers if each.name == name) <= answer.saves / 2


LOADED = """
import torch
from torch import nn

torch.save(nn.Linear(1024, 1024).state_dict(), "weights.pt")
base = nn.Linear(1024, 1024)
base.load_state_dict(torch.load("weights.pt"))
base.requires_grad_(False)
head = nn.Linear(1024, 8)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(4):
    head(base(torch.randn(4, 1024))).mean().backward()
    optimizer.step()
"""


def test_a_start_that_takes_more_than_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = explained(tmp_path / "script.py", LOADED)
    [answer] = [each for each in found.answers if each.name == "load"]
    cured = explained(tmp_path / "cured.py", LOADED, (
        ("base = nn.Linear", "with torch.device('meta'): base = nn.Linear"), ('.pt"))', '.pt"), assign=True)')))
    before, after = (max(each.timeline.totals) for each in (found, cured))
    assert held(answer.saves, before - after) and answer in found.first
    assert not [each for each in cured.answers if each.name == "load"]


IN_EACH_RANK = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[0]}.ranks", rank=0, world_size=1)
try:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(4, 512)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    dist.destroy_process_group()
"""


def test_the_whole_model_on_each_rank(tmp_path):
    found = explained(tmp_path / "script.py", IN_EACH_RANK)
    [answer] = [each for each in found.answers if each.name == "replica"]
    assert answer in found.first and "script.py:10" in str(answer.lines[0]) and "fully_shard" in answer.change
    states = sum(found.moment.ledger[each] for each in ("parameters", "gradients", "optimizer state"))
    assert answer.saves == pytest.approx(states * 7 / 8, abs=100) and answer.bound
    alone = explained(tmp_path / "alone.py", IN_EACH_RANK, [("nn.parallel.DistributedDataParallel(", "(")])
    assert not [each for each in alone.answers if each.name == "replica"]


MANY = """
import torch

keep = [torch.zeros(40) for _ in range(2000)]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_many_tensors_are_each_looked_at_a_few_times(tmp_path, monkeypatch):
    asked, original = [], dead.last_use
    monkeypatch.setattr(dead, "last_use", lambda timeline, i: asked.append(i) or original(timeline, i))
    [answer] = [each for each in explained(tmp_path / "script.py", MANY).answers if each.name == "unread"]
    assert answer.saves == 2000 * 160 and len(asked) < 6 * 2000


BY_TURNS = """
import torch

first, model = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    if step == 0:
        first.weight.sum()
    model(torch.ones(1 + step, 8)).sum().backward()
    optimizer.step()
"""


def test_what_the_second_step_reads_at_once_is_used(tmp_path):
    def unused(*changes):
        return [each for each in explained(tmp_path / "script.py", BY_TURNS, changes).answers if each.name == "unused"]

    assert unused() and not unused(("step == 0", "step == 1"))
