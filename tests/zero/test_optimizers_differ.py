"""Ranks whose optimizers differ would follow different rules with shards of one tensor."""

import functools

import pytest
import torch

from refimpl.comm import CollectiveMismatch, simulate
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

SETTINGS = {"lr": lambda bad: functools.partial(torch.optim.SGD, lr=0.1 + bad),
            "class": lambda bad: functools.partial(torch.optim.Adagrad if bad else torch.optim.SGD, lr=0.1),
            "a tensor": lambda bad: functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1 + bad))}


@pytest.mark.parametrize("engine_class", [DataParallel, Zero1, Zero2, Zero3])
@pytest.mark.parametrize("what", SETTINGS)
def test_optimizers_that_differ_are_named_when_an_engine_is_made(engine_class, what):
    def made(comm, bad):
        model = torch.nn.Linear(4, 4)
        try:
            engine_class(model, comm, SETTINGS[what](bad and comm.rank == 2))
        except CollectiveMismatch as error:
            return str(error)
        return None

    assert simulate(made, 3, False) == [None] * 3
    found = simulate(made, 3, True)
    assert len({*found}) == 1 and found[0].startswith("ranks [2] have another optimizer than rank 0: rank 0: ")
    assert "1.1" in found[0] or "Adagrad" in found[0]
