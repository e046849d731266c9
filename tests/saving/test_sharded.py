"""Saved on so many ranks, cut in one way, and loaded on others, cut in another: to the bit, and a group at a time."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from rank_pool import on_ranks
from saving_kit import BY_COLUMNS, BY_ROWS, MIXED, OPTIMIZERS, Holder, alone, differing, whole_state
from torch import nn
from zero_steps import above, stack

from refimpl import saving
from refimpl.comm import FakeCommunicator, launch
from refimpl.saving import TrainingState, description, sharded
from refimpl.saving.durable import safetensors_bytes, widest_first
from refimpl.sharding import Shard, ShardSpec

CUTS = {"flat": {}, "rows": {"dims": BY_ROWS, "tp": 2}, "columns": {"dims": BY_COLUMNS, "tp": 2},
        "mixed": {"dims": MIXED, "tp": 2}, "mixed, all": {"dims": MIXED, "tp": 4}, "stages": {"stages": 2},
        "stages, rows": {"stages": 2, "dims": BY_ROWS, "tp": 2}, "columns on 3": {"dims": BY_COLUMNS, "tp": 3}}
WORLDS = {1: ["flat"], 2: ["flat", "rows", "columns", "stages"], 3: ["flat", "columns on 3"],
          4: ["flat", "rows", "columns", "mixed", "mixed, all", "stages", "stages, rows"]}


def saved(comm, folder, optimizer):
    """{cut: state_dict} of what is saved on this world, each by another cut."""
    found = {}
    for cut in WORLDS[comm.world_size]:
        holder = Holder(comm, optimizer=optimizer, **CUTS[cut]).train(2)
        holder.save(folder / f"{comm.world_size} {cut}")
        found[comm.world_size, cut] = holder.state_dict()
    return found


def loaded(comm, folder, optimizer, sources, expected, continued):
    """What is not as it was saved, in what is loaded here: each source by one of the cuts; nor after a step."""
    wrong, cuts = {}, WORLDS[comm.world_size]
    for number, cut in enumerate(cuts):
        for source in sources[number :: len(cuts)]:
            holder = Holder(comm, optimizer=optimizer, seed=7, **CUTS[cut]).train(1).load(folder / source)
            wrong[cut, source] = differing(holder.state_dict(), expected)
            holder.save(folder / "back")
            again = Holder(comm, optimizer=optimizer, seed=8, **CUTS["flat"]).load(folder / "back")
            for each in (again, holder):
                wrong[cut, source] += differing(each.train(1).state_dict(), continued)
    return {key: found for key, found in wrong.items() if found}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_cut_on_any_world_loads_what_any_other_saved(tmp_path, optimizer):
    expected, found = alone(optimizer=optimizer).train(2).state_dict(), {}
    for world_size in WORLDS:
        found |= launch(saved, world_size, tmp_path, optimizer)[0]
    assert {key: wrong for key, sd in found.items() if (wrong := differing(sd, expected))} == {}
    continued = alone(optimizer=optimizer).train(3).state_dict()
    sources = [f"{world} {cut}" for world, cut in found]
    for world_size in WORLDS:
        assert launch(loaded, world_size, tmp_path, optimizer, sources, expected, continued) == [{}] * world_size


def taken(comm, expected):
    """By a state_dict each cut is as it was given, and others than rank 0 hold nothing."""
    for cut in WORLDS[comm.world_size]:
        holder = Holder(comm, seed=7, **CUTS[cut]).train(1).load_state_dict({} if comm.rank else expected)
        again = holder.state_dict()
        assert (again == {}) if comm.rank else (again and differing(again, expected) == [])


@pytest.mark.parametrize("world_size", WORLDS)
def test_any_cut_takes_a_state_dict(world_size):
    launch(taken, world_size, alone().train(2).state_dict())


@on_ranks(2)
def test_training_goes_on_with_the_same_random_numbers(comm, tmp_path):
    holder = Holder(comm, BY_ROWS, tp=2)
    holder.save(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(9)
    holder.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


@on_ranks(4)
def test_one_group_is_loaded_at_a_time(comm, tmp_path):
    """`Holder.loaded` says so if not, and empties all other groups."""
    for number, cut in enumerate(("mixed", "stages, rows", "columns")):
        holder, path, found = Holder(comm, away=True, **CUTS[cut]), tmp_path / f"{number}", []
        groups = len({shard.group for shard in holder.shards})
        expected = Holder(comm, **CUTS[cut]).state_dict()
        for work, *given in ((saving.save, path), (saving.load, path), (saving.state_dict,),
                             (saving.load_state_dict, expected), (saving.save_weights, f"{path} w"),
                             (saving.save_weights, f"{path} w", None)):
            holder.loads.clear()
            work(holder.state, *given)
            found.append(len(holder.loads))
        assert differing(holder.state_dict(), expected) == []
        saved, loaded, given, taken, weights, own = found
        assert loaded == groups  # each once
        assert saved <= 4 * groups  # once for each width: 8, 4 and 2 bytes, and 1
        assert max(given, taken) <= groups + 2 and max(weights, own) <= 3 * groups


def test_a_save_that_loads_all_groups_is_found(tmp_path, monkeypatch):
    """The mutant: all groups are loaded before anything is written."""
    def all_groups(state):
        with state.loaded(0), state.loaded(1):
            yield lambda group: None
    monkeypatch.setattr(TrainingState, "one_group", contextlib.contextmanager(all_groups))
    with pytest.raises(AssertionError, match=r"groups \[0, 1\] are loaded at a time"):
        alone(away=True).save(tmp_path)


def held(comm, cut, writes_all=False):
    """A 24×16 weight as `cut` holds it, and a bias that all hold; after a step."""
    model, shards = nn.Linear(16, 24), []
    for number, (name, p) in enumerate(model.named_parameters()):
        N, r = comm.world_size, comm.rank
        spec = ShardSpec(name, p.shape, replicas=tuple(range(N)) if N > 1 else ())
        if name == "weight" and cut == "rows":
            spec = ShardSpec(name, p.shape, (r * 24 // N, 0), ((r + 1) * 24 // N - r * 24 // N, 16))
        elif name == "weight" and cut == "flat":
            spec = ShardSpec(name, p.shape, first=r * p.numel() // N, end=(r + 1) * p.numel() // N)
        own = nn.Parameter(torch.zeros(spec.numel))
        shards.append(Shard(spec, own.detach(), "parameters", p.dtype, own,
                            spec if writes_all or r == 0 or not spec.replicas else None, number))
        own.grad = torch.ones(spec.numel)
    optimizer = torch.optim.Adam([shard.own for shard in shards])
    optimizer.step()
    return TrainingState(comm, shards, optimizer, [["weight", "bias"]], model, 1)


def sizes(comm, folder, writes_all=False):
    check = (lambda specs: None) if writes_all else description.check_specs
    with mock.patch.object(description, "check_specs", check):
        for cut in ("whole", "rows", "flat"):
            saving.save(held(comm, cut, writes_all), folder / cut)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_element_is_written_once(tmp_path, world_size):
    launch(sizes, world_size, tmp_path)
    for cut in ("whole", "rows", "flat"):
        found = 0
        for rank in range(world_size):
            state = held(FakeCommunicator(rank, world_size), cut)
            specs = [(f"{key}/{shard.spec.name}", torch.float32, (shard.owned.numel,)) for shard in state.shards
                     if shard.owned for key in ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")]
            specs.append(("rng/cpu", torch.uint8, (5056,)))
            path, = (tmp_path / cut).glob(f"step-*/rank-0000{rank}.safetensors")
            assert os.path.getsize(path) == safetensors_bytes(widest_first(specs, lambda spec: spec[1]))
            found += os.path.getsize(path) - 5056
        assert 0 < found - (24 * 16 + 24) * 12 < 400 + 400 * world_size  # Ψ · (4 + 8), and headers


def test_ranks_that_write_their_replicas_too_write_more(tmp_path):
    """The mutant, which the check of owners refuses."""
    with pytest.raises(RuntimeError, match=r"weight: elements 0 … 383 are on rank 0 and on rank 1"):
        launch(lambda comm: saving.save(held(comm, "whole", True), tmp_path), 2)
    found = []
    for writes_all in (True, False):
        launch(sizes, 2, tmp_path, writes_all)
        found.append({cut: sum(os.path.getsize(path) for path in (tmp_path / cut).glob("step-*/rank*"))
                      for cut in ("whole", "rows", "flat")})
    wrong, right = found
    assert all(wrong[cut] >= right[cut] + (24 + (24 * 16 if cut == "whole" else 0)) * 12 for cut in right)


def peaks(folder):
    """Bytes above what was there before, in save and in load, of eight 128×128 weights."""
    model = stack(8, 128)
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = whole_state(model, optimizer)
    return [above(model, optimizer, work, state, folder) for work in (saving.save, saving.load)]


def test_no_copy_of_everything_is_made(tmp_path, monkeypatch):
    (save, load), piece = peaks(tmp_path / "whole"), 128 * 128 * 4
    assert save < 20_000 and piece <= load <= 2 * piece + 20_000  # a file's tensor in memory, and the one before
    write, copy, hoard = sharded.write_tensors, sharded._copy, []
    monkeypatch.setattr(sharded, "write_tensors", lambda path, specs, tensors: write(path, specs, [
        x.clone() for x in tensors]))
    monkeypatch.setattr(sharded, "_copy", lambda stored, name, *args: (
        hoard.append(stored.get_tensor(f"parameters/{name}")), copy(stored, name, *args)))
    save, load = peaks(tmp_path / "copied")
    assert save >= 3 * 8 * piece and load > 8 * piece


@on_ranks(2)
def test_a_load_that_ignores_offsets_is_found(comm, tmp_path):
    """The mutant takes a box for one at the beginning of its tensor; as it should be is what the first test loads."""
    saved = Holder(comm, BY_COLUMNS, tp=2).train(1)
    saved.save(tmp_path)
    boxes, expected = ShardSpec.boxes, saved.state_dict()
    with mock.patch.object(ShardSpec, "boxes", lambda spec: [
            ((0,) * len(at), lengths, place) for at, lengths, place in boxes(spec)]):
        holder = Holder(comm, BY_ROWS, tp=2, seed=7).load(tmp_path)
    wrong = set(differing(holder.state_dict(), expected))
    assert comm.rank or {"up.weight", "down.weight", ("up.weight", "exp_avg"), "still.weight"} <= wrong
    assert "norm.weight" not in wrong
