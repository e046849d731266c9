"""Optimizers of torch: what each keeps is cut into pieces and put together again, or refused by name."""

import functools
import itertools

import pytest
import torch
from rank_pool import on_ranks
from saving_kit import Holder, differing
from torch import nn

from refimpl import saving
from refimpl.comm import FakeCommunicator, launch
from refimpl.saving import SavedStateError, TrainingState
from refimpl.sharding import Shard, ShardSpec

OPTIMIZERS = {
    "Adam, amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "Adam, lr in a tensor": functools.partial(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "Adam, fused": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
    **{name: getattr(torch.optim, name) for name in ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD")},
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True), "Rprop": torch.optim.Rprop,
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD, nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)}


class Scaled(nn.Module):
    """A parameter of no dimensions, one of one element, and one that is never used."""
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(2.0))
        self.shift, self.idle = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))


def make(comm, optimizer, seed=0, **how):
    """What rank of a world holds, all in one param group."""
    holder = Holder(comm, optimizer=lambda groups: optimizer([p for group in groups for p in group["params"]]),
                    seed=seed, build=Scaled, **how)
    holder.names = [[*holder.names[0], *holder.names[1]]]
    return holder


WHOLE, ROWS, FLAT = {"tp": 2}, {"dims": {"layer.weight": 0, "layer.bias": 0}, "tp": 2}, {}


def round_trip(comm, folder, names):
    found, ways = {}, ((FLAT, WHOLE), (WHOLE, ROWS), (ROWS, FLAT))
    for name, (cut, other) in zip(names, itertools.cycle(ways), strict=False):
        # torch's fused kernel on a CPU rounds the last elements of a tensor otherwise than those before
        other = cut if name == "Adam, fused" else other
        before = make(comm, OPTIMIZERS[name], **cut).train(2)
        before.save(folder)
        after = make(comm, OPTIMIZERS[name], seed=7, **other).load(folder)
        saved, loaded = before.state_dict(), after.state_dict()
        trained, continued = (each.train(1).state_dict() for each in (before, after))
        types = [[(key, type(value)) for key, value in each.optimizer.param_groups[0].items() if key != "params"]
                 for each in (before, after)]
        found[name] = differing(loaded, saved), differing(continued, trained), differing(trained, saved), types, saved
    return found


def test_any_optimizer_that_treats_each_element_by_itself(tmp_path):
    first, second = launch(round_trip, 2, tmp_path, list(OPTIMIZERS))
    for key, (loaded, continued, trained, types, _) in first.items():
        assert loaded == continued == [] != trained, key
        assert types[0] == types[1] == second[key][3][0], key
    assert not first["SGD, nesterov"][-1]["optimizer"].get("idle")


def test_a_state_that_was_not_saved_goes(tmp_path):
    """Saved before the first step, or after one in which a parameter was not used."""
    comm = FakeCommunicator(0, 1)
    for steps in (0, 1):
        before, after = (make(comm, torch.optim.Adam, seed).train(count) for seed, count in ((0, steps), (7, 3)))
        idle, = (shard.own for shard in after.shards if shard.spec.name == "idle")
        after.optimizer.state[idle] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4)}
        before.save(tmp_path)
        after.load(tmp_path)
        assert differing(after.state_dict(), before.state_dict()) == [] and idle not in after.optimizer.state
        assert differing(after.train(1).state_dict(), before.train(1).state_dict()) == []


@pytest.mark.parametrize(("saves", "loads"), [
    (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.5)),
    (functools.partial(torch.optim.Adam, amsgrad=True), torch.optim.Adam)])
@pytest.mark.parametrize("reversed_", [False, True])
def test_an_optimizer_that_keeps_less_or_more_becomes_what_was_saved(saves, loads, reversed_, tmp_path):
    saves, loads = (loads, saves) if reversed_ else (saves, loads)
    comm = FakeCommunicator(0, 1)
    before = make(comm, saves).train(2)
    before.save(tmp_path)
    sd = before.state_dict()
    for load, source in ((Holder.load, tmp_path), (Holder.load_state_dict, sd)):
        after = load(make(comm, loads, seed=7).train(1), source)
        assert differing(after.state_dict(), sd) == []
        again = make(comm, saves, seed=9).load_state_dict(sd)
        assert differing(after.train(2).state_dict(), again.train(2).state_dict()) == []


@pytest.mark.parametrize(("saves", "loads"), [
    (torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.AdamW), (torch.optim.Adam, torch.optim.AdamW)])
def test_an_optimizer_of_another_class_is_refused_and_nothing_changes(saves, loads, tmp_path):
    comm = FakeCommunicator(0, 1)
    saved = make(comm, saves).train(1)
    saved.save(tmp_path)
    holder = make(comm, loads, seed=7).train(1)
    before, said = holder.state_dict(), f"its optimizer is .*{saves.__name__}, here .*{loads.__name__}"
    for load, source in ((holder.load, tmp_path), (holder.load_state_dict, saved.state_dict())):
        with pytest.raises(SavedStateError, match=said):
            load(source)
        assert differing(holder.state_dict(), before) == []


def test_a_state_that_cannot_be_cut(tmp_path):
    comm = FakeCommunicator(0, 1)
    holder = make(comm, torch.optim.Adafactor)
    p = nn.Parameter(torch.zeros(3, 5))
    holder.shards = [Shard(ShardSpec("layer.weight", (3, 5)), p.detach().view(-1), "parameters", p.dtype, p,
                           ShardSpec("layer.weight", (3, 5)))]  # updated whole
    holder.optimizer, p.grad = torch.optim.Adafactor([p]), torch.ones(3, 5)
    holder.optimizer.step()
    said = r"state 'row_var' of layer.weight is shape \(3, 1\): expected a number, or a tensor of the shape \(3, 5\)"
    for work in (holder.state_dict, lambda: holder.save(tmp_path)):
        with pytest.raises(TypeError, match=said):
            work()
    holder = make(comm, torch.optim.SGD).train(1)
    holder.optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(TypeError, match="the param groups have schedule=<built-in function print>"):
        holder.save(tmp_path)


@on_ranks(2, fails="rank 1 has another optimizer state of .* than ranks before it")
def test_ranks_whose_states_differ(comm):
    holder = make(comm, torch.optim.Adam).train(1)
    for state in holder.optimizer.state.values():
        state["step"] += comm.rank
    holder.state_dict()


@on_ranks(2)
def test_what_is_updated_whole_is_saved_and_loaded(comm, tmp_path):
    """The optimizer may update a whole parameter, of which the rank writes a part; of any layout in memory."""
    def hold(seed):
        torch.manual_seed(seed)
        p, spec = nn.Parameter(torch.randn(5, 3).t().detach()), ShardSpec("layer.weight", (3, 5))
        assert not p.is_contiguous()
        model = nn.ModuleDict({"layer": nn.Linear(5, 3, bias=False)})
        model["layer"].weight = p
        optimizer, p.grad = torch.optim.Adam([p]), torch.ones(3, 5)
        optimizer.step()
        owned = spec.cut(8 * comm.rank, 8 + 7 * comm.rank)
        shard = Shard(spec, p.detach(), "parameters", p.dtype, p, owned)
        return p, optimizer, TrainingState(comm, [shard], optimizer, [["layer.weight"]], model)
    p, optimizer, state = hold(0)
    saving.save(state, tmp_path)
    for load, given in ((saving.load, tmp_path), (saving.load_state_dict, saving.state_dict(state))):
        q, other, again = hold(7)
        load(again, given)
        assert torch.equal(p, q) and torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])
