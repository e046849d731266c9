"""Saved by one stage on so many ranks, loaded by another on others: to the bit, and in slices."""

import functools
import itertools
import unittest.mock

import pytest
import torch
from rank_pool import on_ranks
from saving_kit import OPTIMIZERS, Plain, build, differing, make, plain, train
from torch import nn
from zero_kit import ENGINES, equal, parameters_of
from zero_steps import above, stack, update

from refimpl.comm import FakeCommunicator, RankError, launch, simulate
from refimpl.saving import sharded
from refimpl.zero import DataParallel, SavedStateError, Zero3
from refimpl.zero.closed_forms import saved_bytes
from refimpl.zero.internals import persistence
from refimpl.zero.internals.persistence import spec


def saved(comm, folder, optimizer):
    """{(world, stage): state_dict} of what each stage has saved."""
    found = {}
    for stage in range(4):
        engine = train(make(comm, stage, optimizer), 2)
        engine.save(folder / f"{comm.world_size}-{stage}")
        found[comm.world_size, stage] = engine.state_dict()
    return found


def loaded(comm, folder, optimizer, expected):
    """Each stage here loads from all worlds, from another stage in each: what is not as it was saved."""
    wrong = {}
    for stage, world in itertools.product(range(4), (1, 2, 3, 4)):
        key = world, (stage + world) % 4
        options = {"persistence_threshold": 20} if stage == 3 and world > 2 else {}
        engine = train(make(comm, stage, optimizer, seed=7, bucket_bytes=300 + 200 * stage, **options), 1)
        engine.load(folder / f"{key[0]}-{key[1]}")
        here = engine.state_dict()
        wrong[key, stage] = differing(here, expected[key])
        model = expected[key]["model"]
        wrong[key, stage] += [name for name, p in {**parameters_of(engine), "seen": engine.model.seen}.items()
                              if not torch.equal(p, model[name])]
        if engine.param_groups[0]["lr"] != 0.9**2 * OPTIMIZERS[optimizer].keywords["lr"]:
            wrong[key, stage] += ["lr"]
    return {key: found for key, found in wrong.items() if found}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_stage_and_world_loads_what_any_other_saved(tmp_path, optimizer):
    expected = {}
    for world_size in (1, 2, 3, 4):
        expected |= launch(saved, world_size, tmp_path, optimizer)[0]
    for world_size in (1, 2, 3, 4):
        assert launch(loaded, world_size, tmp_path, optimizer, expected) == [{}] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_training_goes_on_to_the_bit(comm, tmp_path, world_size):
    """Six steps with a save after three; each stage from there; and a stage that forgets the random numbers."""
    train(engine := make(comm, 2), 3).save(tmp_path)
    expected = parameters_of(train(engine, 3))
    for stage, forgets in ((0, False), (1, False), (2, False), (3, False), (2, True)):
        engine = make(comm, stage, seed=7)
        engine.load(tmp_path)
        if forgets:
            torch.manual_seed(8)
        ours = parameters_of(train(engine, 3))
        assert not torch.equal(ours["one.weight"], expected["one.weight"]) if forgets else equal(ours, expected)


@on_ranks(2)
def test_16_bit_parameters_are_saved_as_their_masters(comm, tmp_path):
    """A bf16 model with masters; back, to fp32, and an fp32 one to bf16 with masters."""
    low = torch.bfloat16
    engine = train(make(comm, 2, dtype=low), 2)
    engine.save(tmp_path)
    expected, rounded = engine.state_dict(), parameters_of(engine)
    assert comm.rank or expected["model"]["one.weight"].dtype == torch.float32
    for stage in (1, 3):
        engine = make(comm, stage, seed=7, dtype=low)
        engine.load(tmp_path)
        assert all(p.dtype == low and torch.equal(p, rounded[name]) for name, p in parameters_of(engine).items())
        assert differing(engine.state_dict(), expected) == []
    engine = make(comm, 0, seed=7)
    engine.load(tmp_path)
    assert differing(engine.state_dict(), expected and {**expected, "model": {
        name: x.float() if x.is_floating_point() else x for name, x in expected["model"].items()}}) == []
    said = r"one.weight: \(10, 10\) bfloat16 with a master in float32, here \(10, 10\) bfloat16;"
    with pytest.raises(SavedStateError, match=said):
        make(comm, 0, dtype=low).load(tmp_path)


def test_fp32_goes_into_masters(tmp_path):
    comm = FakeCommunicator(0, 1)
    engine = plain(comm, 3)
    engine.save(tmp_path)
    other = plain(comm, 1, torch.bfloat16, seed=7)
    other.load(tmp_path)
    assert differing(other.state_dict(), engine.state_dict()) == []
    assert torch.equal(other.model.layer.weight, engine.state_dict()["model"]["layer.weight"].bfloat16())


@on_ranks(4)
def test_more_ranks_than_parameters(comm, tmp_path):
    """One element on four ranks."""
    engine = plain(comm, 3, shape=(1, 1))
    engine.save(tmp_path)
    other = plain(comm, 2, shape=(1, 1), seed=7)
    other.load(tmp_path)
    assert differing(engine.state_dict(), other.state_dict()) == []
    alone = plain(FakeCommunicator(0, 1), 0, shape=(1, 1), seed=9)
    alone.load(tmp_path)
    assert alone.state_dict()["optimizer"]["layer.weight"]["step"] == 1


class EachWritesAll(DataParallel):
    """The mutant: what all ranks hold, all ranks write."""
    def save(self, directory):
        with unittest.mock.patch.object(persistence, "owned", lambda engine, _, piece: spec(engine, piece)):
            super().save(directory)


def sizes(comm, folder):
    for stage in range(4):
        plain(comm, stage, shape=(64, 64)).save(folder / f"{stage}")
        train(make(comm, stage), 1).save(folder / f"{stage} odd")
    said = ".*layer.weight: elements 0 … 4095 are on rank 0 and on rank 1"
    with pytest.raises(RankError if comm.rank else ValueError, match=said):
        plain(comm, 0, shape=(64, 64), make=lambda _: EachWritesAll).save(folder / "mutant")
    return {saved.name: {path.name: path.stat().st_size for path in saved.glob("*/*")} for saved in folder.iterdir()}


def test_files_have_the_bytes_of_the_closed_form(tmp_path):
    found, *_ = launch(sizes, 3, tmp_path)
    for stage in range(4):
        expected = saved_bytes(Plain(64, 64), 3, stage, bucket_bytes=500)
        assert found[f"{stage}"] == expected
        share = sum(expected.values()) - 3 * 5056
        assert 64 * 64 * 12 < share < 64 * 64 * 12 + 3 * 400  # Ψ · (4 + 8), and headers
        assert found[f"{stage} odd"] == saved_bytes(build(), 3, stage, bucket_bytes=500)
    assert "mutant" not in found


def peaks(folder, stage):
    """Bytes above what was there before, in save and in load."""
    adamw = OPTIMIZERS["adamw"]
    engine = ENGINES[stage](stack(8, 128), FakeCommunicator(0, 1), adamw, bucket_bytes=3 * 128 * 128 * 4)
    update(engine, engine.forward(torch.ones(1, 128)).sum())
    return [above(engine.model, engine.optimizer, work, folder) for work in (engine.save, engine.load)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_copy_of_everything_is_made(tmp_path, monkeypatch, stage):
    (save, load), piece = peaks(tmp_path / "whole", stage), 128 * 128 * 4
    assert save < 20_000 and piece <= load <= 2 * piece + 20_000  # a file's tensor in memory, and the one before
    cut, copy, hoard = sharded.elements, sharded._copy, []
    monkeypatch.setattr(sharded, "elements", lambda *args: hoard.append(cut(*args).clone()) or hoard[-1])
    monkeypatch.setattr(sharded, "_copy", lambda stored, name, *args: (
        hoard.append(stored.get_tensor(f"parameters/{name}")), copy(stored, name, *args)))
    save, load = peaks(tmp_path / "copied", stage)
    assert save > 3 * 8 * piece and load > 8 * piece


def test_what_is_whole_when_a_load_comes_is_gathered_again(tmp_path):
    """Stage 3 that keeps parameters from forward to backward, and has had no backward yet."""
    comm, x = FakeCommunicator(0, 1), torch.ones(2, 8)
    plain(comm, 2).save(tmp_path)
    engine = plain(comm, 3, seed=7, make=lambda stage: functools.partial(Zero3, reshard_after_forward=False))
    engine.forward(x)
    engine.load(tmp_path)
    assert torch.equal(engine.forward(x), plain(comm, 2).forward(x))


class WithNone(nn.Module):
    """One of its parameters has no elements."""

    def __init__(self):
        super().__init__()
        self.layer, self.none = nn.Linear(2, 2), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.layer(x).sum() + self.none.sum()


def test_what_has_no_elements_is_saved_by_rank_0_at_stage_0():
    """Its optimizer state, too; then others load it."""
    def started(comm):
        engine = DataParallel(WithNone(), comm)
        update(engine, engine(torch.ones(1, 2)))
        owned = {shard.spec.name: shard.owned for shard in engine.shards()}
        return owned["none"], engine.state_dict()

    for world_size in (1, 2):
        (owned, sd), *others = simulate(started, world_size)
        assert owned.shape == (0, 3) and all(other is None for other, _ in others)
        assert sd["model"]["none"].shape == (0, 3) and set(sd["optimizer"]["none"]) == {"step", "exp_avg", "exp_avg_sq"}
