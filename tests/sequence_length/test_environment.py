"""Random numbers and autocast of a forward, again in its recomputation."""

import torch

from refimpl import memory
from refimpl.sequence_length.environment import Environment

CPU = torch.device("cpu")


def test_the_same_numbers_and_afterwards_as_if_none_had_been_drawn():
    model = torch.nn.Linear(1, 1)
    environment = Environment(model, CPU)
    drawn = torch.rand(3)
    environment.settle()
    state = torch.get_rng_state()
    with environment.restored():
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_that_drew_nothing_keeps_no_state():
    with memory.track() as t:
        environment = Environment(torch.nn.Linear(1, 1), CPU)
        assert t.now.total >= 5056
        environment.settle()
    assert t.now.total == t.start.total
    assert Environment(torch.nn.Linear(1, 1).eval(), CPU)._random == []


def test_autocast_as_it_was():
    with torch.autocast("cpu", torch.bfloat16):
        environment = Environment(torch.nn.Linear(1, 1), CPU)
    with environment.restored():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    outside = Environment(torch.nn.Linear(1, 1), CPU)
    with torch.autocast("cpu", torch.bfloat16), outside.restored():
        assert not torch.is_autocast_enabled("cpu")
