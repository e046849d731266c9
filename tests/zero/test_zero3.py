"""Stage 3: parameters are in shards, and whole while a unit computes with them."""

import copy
import types
import unittest.mock

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ADAMW, SGD, copied, equal, gpt, model_of, parameters_of, rows_of, square, train_gpt
from zero_steps import ParametersKept, as_predicted, most, stack, tracked, train, update

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator, RankError, launch
from refimpl.zero import Zero3
from refimpl.zero.gathering import Gathering
from refimpl.zero.units import default_units, unit_buckets


@pytest.mark.parametrize(("make", "is_so"), [(Zero3, True), (ParametersKept, False)])
def test_parameters_are_those_of_a_share(make, is_so):
    assert as_predicted(make, 3, "parameters") == is_so


def most_parameters(make, **options):
    """Bytes of parameters at the highest moment of the second step, of eight layers on a rank of 4."""
    engine = make(stack(8), FakeCommunicator(0, 4), SGD, **options)
    return most(tracked(engine, torch.ones(1, 64)), "parameters") // (64 * 64 * 4)


def test_few_units_are_whole_at_once():
    """In layers, of which a rank's shards are two: one that computes, and what `look_ahead` lets come."""
    assert most_parameters(Zero3, look_ahead=0) == 2 + 1
    assert most_parameters(Zero3) == most_parameters(Zero3, look_ahead=1) == 2 + 2
    assert most_parameters(Zero3, look_ahead=3) == 2 + 4
    assert most_parameters(Zero3, look_ahead=7, max_live_parameters=3 * 64 * 64) == 2 + 3
    assert most_parameters(Zero3, look_ahead=7) == 2 + 8
    assert most_parameters(Zero3, look_ahead=0, reshard_after_forward=False) == 2 + 8
    assert most_parameters(ParametersKept, look_ahead=0) == 2 + 8


def fresh():
    """A tracker that comes when parameters are released: what it counts at the start, at the peak and at the end."""
    t = tracked(Zero3(stack(8), FakeCommunicator(0, 4), SGD, look_ahead=0), torch.ones(1, 64), steps=1)
    return [ledger["parameters"] for ledger in (t.start, t.peak, t.now)]


def test_a_dry_run_counts_what_comes_when_it_comes():
    layer = 64 * 64 * 4
    assert fresh() == memory.dry_run(fresh).result == [2 * layer + 4, 3 * layer + 4, 2 * layer + 4]


class Emptied(Zero3):
    """The mutant: released parameters are views of a storage without bytes."""
    def _make_parameters(self):
        def hide(gathering, bucket):
            gathering.whole[bucket].untyped_storage().resize_(0)
        with unittest.mock.patch.object(Gathering, "hide", hide):
            super()._make_parameters()


def looking(comm, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    expected, engine = copied(model), make(model, comm, SGD)
    def is_away():
        for name, p in model.named_parameters():
            for use in (torch.isnan, torch.Tensor.clone, torch.Tensor.zero_, torch.Tensor.detach, copy.deepcopy):
                with pytest.raises(RuntimeError, match=f"^{name} is in shards, and is read or written outside"):
                    use(p)
            assert "in shards" in repr(p) and p.shape == expected[name].shape
        return True
    assert is_away()
    with pytest.raises(ArithmeticError), engine.gathered():
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
        raise ArithmeticError
    assert is_away()
    for _ in range(2):
        update(engine, square(engine, torch.ones(2, 4)))
        assert is_away()
    return parameters_of(engine), expected


def test_outside_of_a_step_who_reads_is_told_the_name_and_gathered_brings_them():
    (ours, before), = launch(looking, 1, Zero3)
    assert not equal(ours, before) and all(p.isfinite().all() for p in ours.values())
    with pytest.raises(RankError, match="rank 0 was killed by SIGSEGV"):
        launch(looking, 1, Emptied)


@on_ranks(2)
def test_what_stays_is_there_after_all_was_gathered(comm):
    """Parameters are read between steps, or not; the small ones stay."""
    found = []
    for looks in (False, True):
        engine = Zero3(model_of("twice"), comm, ADAMW, persistence_threshold=50)
        for step in range(3):
            train(engine, 1, step)
            if looks:
                parameters_of(engine)
            assert engine.model.scale.untyped_storage().nbytes() > 0
        found.append(parameters_of(engine))
    assert equal(*found)


@on_ranks(2)
def test_evaluation_in_between(comm):
    """A forward without gradients, between two steps and in one of them, leaves nothing and changes nothing."""
    found = []
    for evaluates in (False, True):
        engine = Zero3(model_of("twice"), comm, ADAMW)
        for step in range(3):
            loss = square(engine, rows_of(comm, step))
            if evaluates:
                with torch.no_grad():
                    square(engine, rows_of(comm, 9))
            engine.backward(loss)
            assert engine.gathering.live() == 0
            engine.step()
        found.append(parameters_of(engine))
    assert equal(*found)


class Remembers(Zero3):
    """The mutant: what was gathered between two steps is taken for the beginning of the next."""
    def _make_parameters(self):
        super()._make_parameters()
        self.gathering.release_unused = lambda: None


@pytest.mark.parametrize("make", [Zero3, Remembers])
def test_after_an_evaluation_the_next_step_gathers_ahead_all_the_same(make):
    engine, x = make(stack(4), FakeCommunicator(0, 2), SGD), torch.ones(1, 64)
    for _ in range(2):
        update(engine, square(engine, x))
    with torch.no_grad():
        engine.forward(x)
    left = engine.gathering.live()
    parameters_of(engine)
    ahead = []
    engine.units[1].register_forward_hook(lambda *_: ahead.append(len(engine.gathering._in_flight)))
    engine.backward(engine.forward(x).sum())
    assert (left == 0 and ahead[0] > 0) == (make is Zero3)


class LeftOpen(Zero3):
    """The mutant: a unit whose forward raises keeps its parameters."""
    def _after_forward(self, unit, args, output):
        if output is not None:
            super()._after_forward(unit, args, output)


@pytest.mark.parametrize("make", [Zero3, LeftOpen])
def test_a_forward_that_raises_leaves_no_unit_whole(make):
    engine = make(stack(4), FakeCommunicator(0, 2), SGD)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine.forward(torch.ones(1, 63))
    assert (engine.gathering.live() == 0) == (make is Zero3)
    assert ("in shards" in repr(engine.model[0].weight)) == (make is Zero3)


@on_ranks(2)
def test_what_stays_from_forward_to_backward_is_gathered_once(comm):
    found, sent = [], []
    for keeps in (True, False):
        engine = train(Zero3(stack(4, 16), comm, SGD, reshard_after_forward=keeps), 1, width=16)
        before = comm.traffic
        train(engine, 1, 1, width=16)
        sent.append((comm.traffic - before)["all_gather"])
        found.append(parameters_of(engine))
    assert equal(*found)
    assert sent[0] - sent[1] == 3 * 16 * 16 * 4 // 2  # all layers but the last, which is not gathered again anyway


def test_units_are_blocks_and_what_is_outside_of_them():
    model = gpt()
    assert default_units(model) == [model.embedding, model.positions, *model.blocks, model.norm, model.head]
    named = list(model.named_parameters())
    buckets = unit_buckets(named, default_units(model), 2)
    assert [{slot.name.split(".")[1] for slot in bucket.slots} for bucket in buckets[1:4]] == [{"2"}, {"1"}, {"0"}]
    assert buckets[-1].slots[0].name == "embedding.weight"  # the head's, too: the first unit has it
    small = unit_buckets(named, default_units(model), 2, persistence_threshold=40)
    assert {slot.name for bucket in small for slot in bucket.slots if slot.parameter.numel() < 40
            and len(bucket.slots) > 1} and len(small) > len(buckets)
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    assert {bucket.dtype for bucket in unit_buckets(list(pair.named_parameters()), [pair], 2)} == {
        torch.float32, torch.float64}
    with pytest.raises(ValueError, match="positions.weight is in none of the 1 units: name a module that holds it"):
        unit_buckets(named, [model.embedding], 2)


def trained(comm, units=lambda model: None, **options):
    model = gpt()
    engine = Zero3(model, comm, ADAMW, units=units(model), **options)
    train_gpt(engine, 2)
    return parameters_of(engine)


@pytest.mark.parametrize("options", [
    {"units": lambda model: [model]}, {"look_ahead": 0}, {"persistence_threshold": 100},
    {"units": lambda model: [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]}])
@on_ranks(1)
def test_how_units_are_cut_and_brought_changes_no_bit(comm, options):
    assert equal(trained(comm, **options), trained(comm))


@on_ranks(2, fails="began other collectives than rank 0(.*\\n)*.*all_gather of some", error=CollectiveMismatch,
          launch=launch, timeout=10)
def test_the_same_units_are_needed_on_every_rank(comm):
    train(Zero3(model_of("unused on a rank"), comm, ADAMW), 1)


BETWEEN = {"nothing": lambda engine, x: None, "thrown away": lambda engine, x: engine(x),
           "raw model": torch.no_grad()(lambda engine, x: engine.model(x)),
           "one unit": torch.no_grad()(lambda engine, x: engine.model[0](x)),
           "evaluated": torch.no_grad()(lambda engine, x: engine(x))}


def among_forwards(comm, between, reshards):
    """Losses of three steps with a forward between backward and step, and what is read after each."""
    engine, found = Zero3(model_of("frozen"), comm, SGD, reshard_after_forward=reshards), []
    for number in range(3):
        x = rows_of(comm, number)
        loss = square(engine, x)
        engine.backward(loss)
        BETWEEN[between](engine, x)
        engine.step()
        seen = parameters_of(engine)
        with engine.gathered(write=True):
            pass
        with torch.no_grad():
            found.append((loss.item(), seen, engine.model(x)))
    return found


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_forward_between_backward_and_step_leaves_no_old_parameters(between, reshards):
    expected, ours = (launch(among_forwards, 2, way, reshards)[0] for way in ("nothing", between))
    for (loss, seen, output), (own, own_seen, own_output) in zip(expected, ours, strict=True):
        assert loss == own and equal(seen, own_seen) and torch.equal(output, own_output)


class Hides(nn.Linear):
    """Its output is in what nobody knows."""
    def forward(self, x):
        return types.SimpleNamespace(tensor=super().forward(x))


class Hiding(nn.ModuleList):
    def forward(self, x):
        return self[0](x).tensor


def test_what_stage_3_cannot_follow_is_named():
    comm, x = FakeCommunicator(0, 2), torch.ones(2, 10, requires_grad=True)
    with pytest.raises(TypeError, match="Hides, a unit, returned SimpleNamespace, in which no tensor can be found"):
        Zero3(Hiding([Hides(10, 10)]), comm, SGD)(x)
    engine = Zero3(nn.Sequential(nn.Linear(10, 10)), comm, SGD)
    with pytest.raises(RuntimeError, match="torch.autograd.grad and double backward need stage 0 to 2"):
        torch.autograd.grad(engine(x).square().sum(), x, create_graph=True)
