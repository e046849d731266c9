"""Ranks that run units in another order are an error that names both orders; nothing has changed by then."""

import types

import pytest
import torch
from torch import nn
from zero_kit import SGD, WIDTH, equal, parameters_of, rows_of, square
from zero_steps import train

from refimpl.comm import CollectiveMismatch, launch
from refimpl.zero import Zero3


class Skipping(nn.Module):
    """Blocks, of which `skipped` are left out."""

    def __init__(self, rows):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, n), nn.Linear(n, WIDTH)) for n in rows)
        self.skipped = ()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x).tanh() + x
        return x


class Unordered:
    """The mutant: a communicator that does not know in what order its collectives began."""

    order = types.SimpleNamespace(digest=0)

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)


def skipping(comm, skipped, evaluates, look_ahead, rows=(WIDTH,) * 5, wrap=lambda comm: comm):
    """A step, and another one in which ranks leave out the blocks `skipped[rank]`, or an evaluation that does: what
    raised, and the parameters before and after."""
    torch.manual_seed(0)
    engine = Zero3(Skipping(rows), wrap(comm), SGD, look_ahead=look_ahead)
    train(engine, 1)
    shards = [shard.clone() for shard in engine.parameters.shards.values()]
    engine.model.skipped = skipped[comm.rank]
    if evaluates:
        with torch.no_grad():
            square(engine, rows_of(comm, 1))
        engine.model.skipped = ()
    try:
        train(engine, 1, 1)
    except CollectiveMismatch as error:
        return (str(error), error.ranks), all(map(torch.equal, shards, engine.parameters.shards.values()))
    return None, parameters_of(engine)


@pytest.mark.parametrize("evaluates", [False, True])
def test_ranks_that_leave_out_other_layers_of_one_size_are_named_and_nothing_has_changed(evaluates):
    for told, unchanged in launch(skipping, 2, ((1,), (3,)), evaluates, 0):
        text, ranks = told
        assert ranks == (1,) and unchanged
        assert "rank 1 began other collectives than rank 0, from #" in text
        assert "all_gather of blocks.2" in text and "all_gather of blocks.1" in text
        assert "none may leave out a layer that others run (LayerDrop, an early exit)" in text


def test_without_the_order_they_would_train_wrong():
    wrong, right = (launch(skipping, 2, skipped, False, 0, (WIDTH,) * 5, Unordered)[0]
                    for skipped in (((1,), (3,)), ((), ())))
    assert wrong[0] is None and not equal(wrong[1], right[1])


def test_what_is_prefetched_is_gathered_by_all_though_some_leave_it_out():
    for told, after in launch(skipping, 2, ((1,), (3,)), True, 100):
        assert told is None and all(p.isfinite().all() for p in after.values())


@pytest.mark.parametrize("skipped", [((1,), (3,)), ((), (3, 4)), ((4,), ())], ids=["one each", "early exit", "last"])
@pytest.mark.parametrize("look_ahead", [0, 100])
def test_layers_of_other_sizes_that_hang_or_abort_are_named_with_both_orders(skipped, look_ahead):
    with pytest.raises(CollectiveMismatch, match=r"rank 1 began other collectives than rank 0.*\n(.*\n)*.*of blocks"):
        launch(skipping, 2, skipped, False, look_ahead, (3, 5, 9, 17, 6), timeout=3)
