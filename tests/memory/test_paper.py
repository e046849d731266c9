"""The idea in one screen beside the tracker, and both beside the allocator alone: the same peak in each category."""

import functools

import pytest
import torch
from one_screen import check_paper
from outside.models import GROUPED, causal

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.papers import meter as paper

WITHIN = 0.005  # of the allocator's peak


def gpt():
    model = GPT(GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=32, heads=4))
    return model, lambda tokens: model(tokens, tokens)


def llama():
    model = causal("llama", **GROUPED)()
    return model, lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


BUILDS = {"gpt": gpt, "llama": llama}
CASES = pytest.mark.parametrize(("build", "rows", "warm"), [  # many rows: the peak is in backward; few: in the update
    (build, rows, warm) for build in BUILDS for rows in ((4, 64), (1, 4)) for warm in (False, True)])


def read(build, rows, warm, instrument):
    """One step under one instrument alone: instrument(model, optimizer, tokens) is its context."""
    torch.manual_seed(0)
    model, loss_of = BUILDS[build]()
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 256, rows)
    def step():
        loss_of(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    if warm:
        step()
    with instrument(model, optimizer, tokens) as t:
        step()
    return t


@functools.cache
def tracked(build, rows, warm):
    return read(build, rows, warm, memory.track)


def assert_same_peak(ours, theirs):
    """Buffers, inputs, activations and temporaries are the rest."""
    ours = ours.peak()
    for name in (paper.PARAMETERS, paper.GRADIENTS, paper.OPTIMIZER_STATE):
        assert ours[name] == theirs.peak[name], name
    assert sum(ours.values()) == theirs.peak.total


@CASES
def test_the_same_peak(build, rows, warm):
    ours, theirs = read(build, rows, warm, paper.Tracker), tracked(build, rows, warm)
    assert_same_peak(ours, theirs)
    assert ours.peak()[paper.PARAMETERS] > 0 and (ours.peak()[paper.GRADIENTS] > 0) == (rows == (1, 4))
    alone = read(build, rows, warm, lambda *_: memory.measure("cpu"))
    assert abs(sum(ours.peak().values()) - theirs.start.total - alone.peak) <= WITHIN * alone.peak


# Mutants.


class NeverFrees(paper.Tracker):
    def died(self, address, number, nbytes):
        del self.alive[address]


class CountsTensors(paper.Tracker):  # a view as much as the storage that it shares
    def see(self, x, category=None):
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in self.alive:
            self.events.append((len(self.events), x.nbytes))
        super().see(x, category)


class Late(paper.Tracker):  # what exists before the step is not seen
    def __init__(self, model, optimizer, *existing):
        super().__init__(model, optimizer)
        self.events.clear()


@pytest.mark.parametrize("broken", [NeverFrees, CountsTensors, Late])
@pytest.mark.parametrize("build", BUILDS)
def test_a_broken_one_fails_here(build, broken):
    with pytest.raises(AssertionError):
        assert_same_peak(read(build, (4, 64), True, broken), tracked(build, (4, 64), True))


def test_it_leaves_no_hook_behind():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with paper.Tracker(model, optimizer) as t:
        pass
    before = len(t.events)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert len(t.events) == before and t.peak()[paper.PARAMETERS] == 440


def test_one_screen_that_is_read_first():
    check_paper("memory", "meter")
