"""What a module writes to its own weight in forward: kept, in shards and masters, where ranks agree; else named."""

import unittest.mock

import pytest
import torch
from offload_kit import LOW
from rank_pool import on_ranks
from torch import nn
from zero_kit import ENGINES, SGD, WIDTH, Elsewhere, batch, equal, farthest, fixed, own_rows, parameters_of

from refimpl.comm import CollectiveMismatch
from refimpl.offload import CPUAdam
from refimpl.zero import DataParallel, Zero3
from refimpl.zero.gathering import Gathering
from refimpl.zero.internals.store import StoredUpdate
from refimpl.zero.internals.writes import digest
from refimpl.zero.quantized import BlockCodec


class Shortened(nn.Module):
    """Rows of at most length 1, of those that are looked up: the same on all ranks, or those of each rank's batch."""

    def __init__(self, alike):
        super().__init__()
        self.table, self.last, self.alike = nn.Embedding(12, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH), alike

    def forward(self, x):
        ids = torch.arange(12) if self.alike else (x[:, 1] * 5).long().abs() % 12
        return self.last(self.table(ids).sum(0) + x)


class Renormalised(nn.Module):
    """Each forward writes all of a weight, after it was read or before."""

    def __init__(self, before=True):
        super().__init__()
        self.first, self.last, self.before = nn.Linear(WIDTH, WIDTH), Normal(before), before

    def forward(self, x):
        return self.last(self.first(x).tanh())


class Normal(nn.Linear):
    def __init__(self, before):
        super().__init__(WIDTH, WIDTH)
        self.before = before

    def forward(self, x):
        if self.before:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class Teacher(nn.Module):
    """A frozen weight that follows a trained one."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return self.student(x) - self.teacher(x)


MODELS = {"max_norm": lambda: Shortened(True), "renormalised": Renormalised, "teacher": Teacher}


def train(engine, dtype, steps=3):
    for step in range(steps):
        engine.backward(engine(own_rows(engine.comm, batch(step, rows=6)).to(dtype)).square().mean())
        engine.step()
    return parameters_of(engine)


def made(name, dtype=torch.float32):
    fixed()
    return MODELS[name]().to(dtype)


def plainly(name, dtype, steps=3):
    """A model that no engine has, with masters if it is of 16 bits."""
    model = made(name, dtype)
    for step in range(steps):
        model(batch(step, rows=6).to(dtype)).square().mean().backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        model.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"persistence_threshold": 10**4}, {"store": True},
                                     {"update": StoredUpdate, "store": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks("world_size")
def test_what_all_ranks_write_is_kept(comm, world_size, stage, name, options):
    if stage < 3 and "persistence_threshold" in options or not stage and "store" in options:
        options = {}
    options = {**options, **({"store": Elsewhere()} if "store" in options else {})}
    ours = train(ENGINES[stage](made(name), comm, SGD, **options), torch.float32)
    assert farthest(plainly(name, torch.float32), ours) < 1e-5 and (world_size > 1 or equal(
        plainly(name, torch.float32), ours))


@pytest.mark.parametrize("update", [None, CPUAdam(), CPUAdam(ratio=0.5)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_masters_follow_what_is_written(comm, stage, update):
    """Rows have length 1 in what is saved, too; what is not written keeps the bits that a 16-bit weight has not."""
    engine = ENGINES[stage](made("renormalised", LOW), comm, torch.optim.AdamW, update=update)
    ours = train(engine, LOW)
    x = own_rows(comm, batch(9, rows=6)).to(LOW)
    with torch.no_grad():
        engine(x)
    engine.check_phase("step")
    masters = engine.state_dict().get("model")
    assert farthest({"w": ours["last.weight"].float().norm(dim=1)}, {"w": torch.ones(WIDTH)}) < 0.01
    if not comm.rank:
        assert farthest({"w": masters["last.weight"].norm(dim=1)}, {"w": torch.ones(WIDTH)}) < 0.005
        assert not torch.equal(masters["first.weight"], masters["first.weight"].to(LOW).float())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_what_ranks_write_differently_is_named_and_shards_are_as_before(comm, world_size, stage):
    fixed()
    engine = ENGINES[stage](Shortened(False), comm, SGD)
    before = parameters_of(engine)
    with pytest.raises(CollectiveMismatch, match="has written other values to table.weight on ranks"):
        train(engine, torch.float32, 1)
    if stage == 3:
        engine.zero_grad()
        assert equal(before, parameters_of(engine))


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2)
def test_what_a_forward_alone_wrote_is_kept_when_all_is_gathered_and_does_not_survive_a_load(comm, reshards):
    engine = Zero3(made("renormalised"), comm, SGD, reshard_after_forward=reshards)
    train(engine, torch.float32, 1)
    with torch.no_grad(), engine.gathered(write=True):
        engine.model.last.weight.fill_(3.0)
    saved = engine.state_dict()
    engine(own_rows(comm, batch(3, rows=6)))
    assert farthest({"w": parameters_of(engine)["last.weight"].norm(dim=1)}, {"w": torch.ones(WIDTH)}) < 1e-5
    engine.check_phase("load")
    engine(own_rows(comm, batch(4, rows=6)))  # it stays whole, or its last unit does
    engine.load_state_dict(saved)
    assert (parameters_of(engine)["last.weight"] == 3.0).all()


@on_ranks(2)
def test_what_is_gathered_in_fewer_bits_is_not_to_be_written(comm):
    engine = Zero3(made("renormalised"), comm, SGD, quantized_weights=BlockCodec(8, 16))
    before = parameters_of(engine)
    with pytest.raises(RuntimeError, match="a module has written to last.weight, which was gathered in fewer bits"):
        train(engine, torch.float32, 1)
    assert equal(before, parameters_of(engine))


class Lost(Gathering):
    """The mutant: what was written goes when the unit is released."""
    def see(self, buckets):
        self._versions = type("Same", (), {"__getitem__": lambda _, p: p._version, "update": lambda *_: None})()


@on_ranks(1)
def test_the_mutant_trains_another_model(comm):
    with unittest.mock.patch("refimpl.zero.sharded_parameters.Gathering", Lost):
        lost = train(Zero3(made("renormalised"), comm, SGD), torch.float32)
    assert farthest(lost, plainly("renormalised", torch.float32)) > 1e-3
    assert equal(train(DataParallel(made("renormalised"), comm, SGD), torch.float32),
                 plainly("renormalised", torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, LOW, torch.int64, torch.bool, torch.uint8])
def test_a_digest_tells_bits_and_their_order(dtype):
    torch.manual_seed(0)
    x = torch.randint(0, 2, (33, 65)).to(dtype)
    other, swapped = x.clone(), x.flip(0)
    other[3, 3] = not x[3, 3]
    assert digest(x) == digest(x.clone()) != digest(other) and digest(x) != digest(swapped)
    assert digest(torch.zeros(4, dtype=dtype)) != digest(torch.ones(4, dtype=dtype))
