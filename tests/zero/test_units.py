"""Which modules are units: the blocks that repeat, whatever holds them, in whatever order they are given."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import SGD, equal, parameters_of
from zero_steps import most, traced, train

from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero3
from refimpl.zero.units import blocks, default_units

COUNT, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Blocks between two layers; `hold` says what holds them."""

    def __init__(self, hold):
        super().__init__()
        torch.manual_seed(0)
        self.first, each = nn.Linear(WIDTH, WIDTH), [Block() for _ in range(COUNT)]
        held = hold(self, each)
        self.each = held if isinstance(held, nn.Module) else each
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.each.values() if isinstance(self.each, nn.ModuleDict) else self.each:
            x = block(x)
        return self.last(x)


HOLDERS = {
    "ModuleList": lambda model, each: nn.ModuleList(each),
    "Sequential": lambda model, each: nn.Sequential(*each),
    "ModuleDict": lambda model, each: nn.ModuleDict({f"layer{i}": block for i, block in enumerate(each)}),
    "attributes": lambda model, each: [model.add_module(f"block{i}", block) for i, block in enumerate(each)],
    "stages": lambda model, each: nn.Sequential(nn.Sequential(*each[:3]), nn.Sequential(*each[3:]))}


@pytest.mark.parametrize("holder", HOLDERS)
def test_blocks_are_units_whatever_holds_them(holder):
    model = Model(HOLDERS[holder])
    found = [module for module in model.modules() if isinstance(module, Block)]
    assert len(found) == COUNT and default_units(model) == [model.first, *found, model.last] or (
        holder == "attributes" and set(default_units(model)) == {model.first, *found, model.last})


class Stage(nn.Module):
    """Blocks and what makes the next stage narrower, as in Swin."""

    def __init__(self):
        super().__init__()
        self.blocks, self.after = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.after(self.blocks(x))


class Stack(nn.Module):
    """An encoder or a decoder, as in T5."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Choosing(nn.Module):
    """Experts, of which a rank may call one alone: its units must not be those."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.experts[int(self.router(x).mean() > 0)](x)


class Pair(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.one, self.two = make(), make()

    def forward(self, x):
        return self.two(self.one(x))


def test_what_holds_blocks_is_no_block_and_experts_are_part_of_one():
    staged, coded, chosen = nn.Sequential(Stage(), Stage()), Pair(Stack), nn.Sequential(Choosing(), Choosing())
    assert blocks(staged) == [*staged[0].blocks, *staged[1].blocks]
    assert blocks(coded) == [*coded.one.layers, *coded.two.layers]
    assert blocks(chosen) == list(chosen)
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == []  # a layer alone is a unit anyway


def most_bytes(model, units=None, **options):
    """The most bytes of whole parameters and of gradients, beyond the shards, in a step of rank 0 of 4, in blocks."""
    engine = Zero3(model, FakeCommunicator(0, 4), SGD, units=units, **options)
    for _ in range(2):
        shards, _, t = traced(engine, lambda: engine.backward(engine.forward(torch.ones(1, WIDTH)).sum()))
    block = 4 * sum(p.numel() for p in Block().parameters())
    return {kind: round((most(t, kind) - shards[kind]) / block, 1) for kind in ("parameters", "gradients")}


def test_blocks_in_a_sequential_take_what_those_in_a_list_take_with_half_of_the_gathers():
    held = {holder: Model(HOLDERS[holder]) for holder in ("ModuleList", "Sequential", "ModuleDict")}
    assert len({str(most_bytes(model)) for model in held.values()}) == 1
    model = Model(HOLDERS["Sequential"])
    leaves = [module for module in model.modules() if module._parameters]  # the mutant: these were its units
    assert len(default_units(model)) == COUNT + 2 < len(leaves)


class Own(nn.Sequential):
    """Blocks and a parameter of their parent."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


ORDERS = {"as they run": lambda units: units, "backwards": lambda units: units[::-1],
          "mixed": lambda units: units[1::2] + units[::2]}


def test_units_in_any_order_take_the_same_bytes():
    """Gathers come in the order of the first step, gradients go where a unit's backward ends, and a parameter is with
    the innermost unit. (A parent named before its blocks once had all of them in one bucket.)"""
    found = {name: most_bytes(model := Own(*(Block() for _ in range(COUNT))), order([model, *model]), in_flight_bytes=0)
             for name, order in ORDERS.items()}
    assert found["backwards"] == found["mixed"] == found["as they run"]
    assert found["as they run"]["gradients"] < 2 and found["as they run"]["parameters"] <= 2.1
    whole = most_bytes(model := Own(*(Block() for _ in range(COUNT))), [model])
    assert whole["gradients"] > COUNT - 1 and whole["parameters"] >= COUNT - 0.1


def test_what_is_in_flight_is_bounded_in_bytes():
    """A unit's gradients and the bucket that they move to, for which one on the wire makes room; and as many more as
    may be on the wire. 10**9 bytes are no bound, the mutant."""
    block = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH)
    found = [most_bytes(Model(HOLDERS["Sequential"]), in_flight_bytes=bound)["gradients"]
             for bound in (None, 0, block + 100, 2 * block + 200, 10**9)]
    assert found[1] == found[2] < found[3] < found[4]
    assert found[0] == found[3]  # two buckets by default, since they are small
    assert found[1] <= 1.8 and found[3] <= 2.8 and found[4] > 3  # buckets and their shards


def trained(comm, order, holder, **options):
    model = Model(HOLDERS[holder])
    engine = Zero3(model, comm, SGD, units=order and ORDERS[order](default_units(model)), **options)
    return parameters_of(train(engine, 2, width=WIDTH))


@on_ranks(2)
def test_the_order_of_units_and_what_is_in_flight_change_no_bit(comm):
    expected = trained(comm, None, "ModuleList")
    for ours in (*(trained(comm, order, "Sequential") for order in ORDERS),
                 trained(comm, None, "stages", in_flight_bytes=10**9)):
        assert equal(dict(zip(expected, ours.values(), strict=True)), expected)


def test_a_look_ahead_that_is_no_number_of_units_is_refused():
    for bad in (-1, 0.5, 50_000_000):
        with pytest.raises(ValueError, match=f"look_ahead={bad}: expected a number of units"):
            Zero3(Model(HOLDERS["Sequential"]), FakeCommunicator(0, 2), SGD, look_ahead=bad)
    with pytest.raises(ValueError, match="in_flight_bytes=-1: expected bytes"):
        Zero3(Model(HOLDERS["Sequential"]), FakeCommunicator(0, 2), SGD, in_flight_bytes=-1)
