"""What a recorder writes down of models and optimizers, and that nothing of it stays when it leaves."""

import gc
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.modules import module as modules

from refimpl.explain.recorder import ScriptRecorder
from refimpl.explain.rows import Axis
from refimpl.explain.uses import Uses


class Flipped(nn.Module):
    """Makes its rows columns, and as many ones as there are rows."""

    def forward(self, x):
        return x.t().contiguous(), torch.ones(len(x), 7)


def test_its_hooks_go_when_it_leaves():
    def hooks():
        return [*modules._global_forward_hooks, *modules._global_forward_pre_hooks, *gc.callbacks]

    before = hooks()
    with ScriptRecorder():
        assert hooks() != before
    assert hooks() == before


def test_what_a_collection_frees_that_began_before_is_not_the_collector_s():
    """A thread may begin while Python collects in another."""
    uses = Uses(SimpleNamespace(events=[(0, 0, 8), (1, 0, -8)]))
    with uses:
        gc.callbacks[-1]("stop", {})
    assert not uses.collected


def test_it_notes_each_optimizer_that_steps():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    with ScriptRecorder() as recorder:
        model(torch.ones(1, 2)).sum().backward()
        for _ in range(2):
            optimizer.step()
            recorder.stepped(optimizer)
    assert [(each.name, each.foreach) for each in recorder.recording().optimizers] == [("SGD", True)]


def test_rows_that_become_columns_are_followed_and_a_single_row_is_not():
    for rows, found in ((3, {Axis(3, 5), Axis(3, 1), Axis(3, 7)}), (1, set())):
        with ScriptRecorder() as recorder:
            Flipped()(torch.ones(rows, 5))
        assert {*recorder.rows.of.values()} == found
