"""What grows from step to step: a leak of each kind is found at three steps, with its line and its holder."""

import gc
import textwrap

import pytest

from refimpl.explain import Explanation, Script, run
from refimpl.explain.kept import growth
from refimpl.explain.kept.holders import Holders
from refimpl.explain.kept.names import CYCLE, UNSEEN

TRAINING = """
import collections, copy, functools, gc, queue, threading
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())


def step(x=None):
    loss = model(torch.randn(8, 64) if x is None else x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(leak):
    for i in range(9):
        leak(i)
        step()
"""
LEAKS = {
    "list": ("""
        kept = []
        for _ in range(9):
            kept.append(torch.randn(1000))  # HERE
            step()
        """, 4000, "`kept`"),
    "dict": ("""
        kept = {}
        for i in range(9):
            kept[i] = torch.randn(1000)  # HERE
            step()
        """, 4000, "`kept`"),
    "deque of an instance": ("""
        class Agent:
            def __init__(self):
                self.memory = collections.deque(maxlen=100)
        agent = Agent()
        train(lambda i: agent.memory.append((torch.randn(1000), i)))  # HERE
        """, 4000, "`Agent.memory`"),
    "closure": ("""
        def noting():
            seen = []
            def note(i):
                seen.append(torch.randn(1000))  # HERE
            return note
        train(noting())
        """, 4000, "`seen` in the closure of noting.<locals>.note()"),
    "hook": ("""
        def watch(module):
            outputs = []
            module.register_forward_hook(lambda module, given, out: outputs.append(out.detach().clone()))  # HERE
        watch(model[0])
        train(lambda i: None)
        """, 8192, "`outputs` in the closure of watch.<locals>.<lambda>()"),
    "cache without an end": ("""
        @functools.lru_cache(maxsize=None)
        def noise(i):
            return torch.randn(1000)  # HERE
        train(noise)
        """, 4000, "the cache of noise()"),
    "cache with an end": ("""
        @functools.lru_cache(maxsize=50)
        def noise(i):
            return torch.randn(1000)  # HERE
        train(noise)
        """, 4000, "the cache of noise()"),
    "graphs of a list": ("""
        scores = []
        train(lambda i: scores.append(model(torch.ones(32, 64)).mean()))  # HERE
        """, 32 * (64 + 256) * 4, "the graph of `scores[…]`"),
    "graph of a sum": ("""
        total = 0
        for _ in range(9):
            total = total + model(torch.ones(32, 64)).square().mean()  # HERE
            step()
        """, 32 * (64 + 256 + 64) * 4, "the graph of `total`"),
    "what a Function keeps": ("""
        class Keep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.mine = torch.randn(1000)  # HERE
                return x.clone()
            @staticmethod
            def backward(ctx, gradient):
                return gradient
        outs, x = [], torch.randn(8, requires_grad=True)
        train(lambda i: outs.append(Keep.apply(x).sum()))
        """, 4000, "`KeepBackward.mine`"),
    "an exception's traceback": ("""
        errors = []
        def fails(i):
            big = torch.randn(1000)  # HERE
            raise ValueError(i)
        def leak(i):
            try:
                fails(i)
            except ValueError as error:
                errors.append(error)
        train(leak)
        """, 4000, "`big` of fails(), in `errors`"),
    "gradient of what is no parameter": ("""
        photos = [torch.randn(8, 64, requires_grad=True) for _ in range(9)]
        for photo in photos:
            step(photo)
        """, 2048, "`.grad` of `photos[…]`"),
    "global": ("""
        history = None
        def leak(i):
            global history
            history = torch.randn(1000), history  # HERE
        train(leak)
        """, 4000, "`history`"),
    "variable of a function that runs": ("""
        def main():
            losses = []
            for _ in range(9):
                losses.append(torch.randn(1000))  # HERE
                step()
        main()
        """, 4000, "`losses` of main()"),
    "variable of a thread": ("""
        items = queue.Queue()
        def work():
            mine = []
            while True:
                mine.append(items.get())
                items.task_done()
        threading.Thread(target=work, daemon=True).start()
        def leak(i):
            items.put(torch.randn(1000))  # HERE
            items.join()
        train(leak)
        """, 4000, "`mine` of work()"),
    "attribute": ("""
        class Sample:
            def __init__(self):
                self.x = torch.randn(1000)  # HERE
        samples = []
        train(lambda i: samples.append(Sample()))
        """, 4000, "`samples[…].x`"),
    "slot": ("""
        class Sample:
            __slots__ = ("empty", "label", "x")
            def __init__(self):
                self.label, self.x = "noise", torch.randn(1000)  # HERE
        samples = []
        train(lambda i: samples.append(Sample()))
        """, 4000, "`samples[…].x`"),
    "attribute of a class": ("""
        class Log:
            rows = []
        train(lambda i: Log.rows.append(torch.randn(1000)))  # HERE
        """, 4000, "`Log.rows`"),
    "generator": ("""
        def stream():
            past = []
            while True:
                past.append(torch.randn(1000))  # HERE
                yield
        endless = stream()
        train(lambda i: next(endless))
        """, 4000, "`endless`"),
    "linked list": ("""
        class Node:
            def __init__(self, before):
                self.value, self.before = torch.randn(1000), before  # HERE
        node = None
        for _ in range(9):
            node = Node(node)
            step()
        """, 4000, "`node.before.value`"),
    "cycle": ("""
        class Both:
            def __init__(self):
                self.me, self.x = self, torch.randn(1000)  # HERE
        gc.disable()
        train(lambda i: Both())
        """, 4000, CYCLE),
    "copies, after the step": ("""
        copies = []
        for _ in range(9):
            step()
            copies.append(copy.deepcopy(model))  # HERE
        """, 4 * (2 * 64 * 256 + 256 + 64), "`copies`"),
    "NumPy": ("""
        kept = []
        for _ in range(9):
            kept.append(torch.randn(1000).numpy())  # HERE
            step()
        """, 4000, UNSEEN),
    "objects that answer nothing": ("""
        class Odd:
            def __init__(self):
                self.x = torch.randn(1000)  # HERE
            def fail(self, *arguments):
                raise RuntimeError("asked")
            __repr__ = __eq__ = __getattr__ = __len__ = __bool__ = __iter__ = fail
            __hash__ = object.__hash__
        odd = []
        train(lambda i: odd.append(Odd()))
        """, 4000, "`odd[…].x`"),
}
STEADY = {
    "nothing is kept": "train(lambda i: None)",
    "the last loss": "for _ in range(9): loss = step()",
    "the last of each, in an attribute": "for _ in range(9): model.last = step()",
    "filled once": """
        cache = {}
        train(lambda i: cache.update(mask=torch.randn(1000)) if i == 1 else None)
        """,
    "a full deque": """
        window = collections.deque(maxlen=3)
        train(lambda i: window.append(torch.randn(1000)))
        """,
    "a full cache": """
        @functools.lru_cache(maxsize=3)
        def noise(i):
            return torch.randn(1000)
        train(noise)
        """,
    "states of parameters that come late": """
        experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))
        optimizer = torch.optim.Adam([*experts.parameters(), *model.parameters()])
        train(lambda i: experts[i](torch.randn(8, 64)).sum().backward())
        """,
}


@pytest.fixture
def explained(tmp_path):
    def explained(text, steps=3):
        path = tmp_path / "train.py"
        path.write_text(TRAINING + textwrap.dedent(text))
        made = run(Script(path), steps)
        assert made.done, made.words
        return Explanation(made)
    yield explained
    gc.enable()  # a script turns it off


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_is_found_with_its_line_and_its_holder(explained, kind):
    text, nbytes, holder = LEAKS[kind]
    found = explained(text)
    [grows] = [each for each in found.run.recording.grows if each.nbytes > 100]
    assert (grows.nbytes, grows.holder) == (nbytes, holder)
    assert "HERE" not in text or "HERE" in grows.lines[0].text
    assert f"grows by {nbytes:,} bytes a step: made at train.py:{grows.lines[0].number}, held by" in str(found)
    assert found.as_dict()["grows"][0]["holder"] == holder


@pytest.mark.parametrize("kind", STEADY)
def test_what_is_given_anew_or_once_does_not_grow(explained, kind):
    assert explained(STEADY[kind]).run.recording.grows == []


CURED = {
    "the list's items": ("graphs of a list", ".mean())", ".mean().detach())"),
    "the list's numbers": ("graphs of a list", ".mean())", ".mean().item())"),
    "the sum": ("graph of a sum", ".mean()", ".mean().detach()"),
    "the input": ("gradient of what is no parameter", "step(photo)", "step(photo.detach().requires_grad_())"),
    "collected": ("cycle", "lambda i: Both()", "lambda i: (Both(), gc.collect())"),
    "a state_dict": ("cycle", "lambda i: Both()", "lambda i: copy.deepcopy(model.state_dict())"),
}


@pytest.mark.parametrize("name", CURED)
def test_what_is_said_to_let_it_go_does(explained, name):
    kind, leaks, cured = CURED[name]
    text = LEAKS[kind][0]
    before = max(explained(text).run.recording.grows, key=lambda each: each.nbytes)
    assert before.cure, "it is said"
    after = explained(text.replace(leaks, cured)).run.recording.grows
    assert sum(each.nbytes for each in after) <= 8, "but for a number a step"


def test_a_total_that_the_collector_decides_is_said(explained):
    assert any("Python's collector decides" in note for note in explained(LEAKS["cycle"][0]).notes)
    assert not any("Python's collector decides" in note for note in explained(LEAKS["list"][0]).notes)


def test_two_steps_do_not_tell_what_grows(explained):
    found = explained(LEAKS["list"][0], steps=2)
    assert found.run.recording.grows is None and found.as_dict()["grows"] is None and "grows" not in str(found)
    assert [(each.nbytes, each.holder) for each in found.run.recording.kept] == [(4000, "`kept`")]


def test_the_collector_waits_while_holders_are_looked_for(explained, monkeypatch):
    collects = []
    monkeypatch.setattr(growth, "Holders", lambda keys: collects.append(gc.isenabled()) or Holders(keys))
    explained(LEAKS["list"][0])
    assert collects == [False] and gc.isenabled()


def test_an_error_of_the_recorder_s_own_is_said(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("a fault of ours")
    monkeypatch.setattr(growth.StepEnds, "outlived", fail)
    (tmp_path / "train.py").write_text(TRAINING + "train(lambda i: None)")
    made = run(Script(tmp_path / "train.py"))
    assert made.status == 1 and not made.done and "a fault of ours" in made.words
    assert "a fault of ours" in capsys.readouterr().err
