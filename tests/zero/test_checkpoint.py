"""Saved by one stage on so many ranks, loaded by another on others: to the bit, in slices, or not at all."""

import contextlib
import errno
import functools
import itertools
import json
import os
import pickle
import re
import shutil

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.zero import CheckpointError, DataParallel, Zero1, Zero2, Zero3, checkpoint, durable, manifest
from refimpl.zero.closed_forms import checkpoint_bytes

ENGINES = (DataParallel, Zero1, Zero2, Zero3)
OPTIMIZERS = {"adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
              "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
WIDTH, ROWS = 10, 12


class Odd(nn.Module):
    """Tied weights, a frozen layer, buffers that are saved and not, a parameter of no dimensions, and dropout."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.three.requires_grad_(False)
        self.scale, self.dropout = nn.Parameter(torch.tensor(1.5)), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.three(self.two(self.dropout(self.one(x)).tanh()).tanh()) * self.scale


def build(seed=0, dtype=None):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Odd().to(dtype)


def two_groups(named):
    """Biases are not decayed, and learn faster."""
    return [{"params": [p for _, p in named if p.dim() == 2], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.dim() < 2], "lr": 0.03, "weight_decay": 0.0}]


def make(comm, stage, optimizer="adamw", seed=0, dtype=None, **options):
    return ENGINES[stage](build(seed, dtype), comm, OPTIMIZERS[optimizer], groups=two_groups,
                          **{"bucket_bytes": 500, **options})


def train(engine, steps, first=0):
    comm = engine.comm
    for step in range(first, first + steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to(next(engine.model.parameters()).dtype).chunk(comm.world_size)[comm.rank]
        engine.backward(engine.forward(x).square().mean())
        engine.step()
        engine.param_groups[0]["lr"] *= 0.9
    return engine


def differing(a, b):
    """Where two state_dicts are not equal to the bit; on a rank that has none, nothing."""
    if not (a and b):
        return []
    found = [key for key in ("class", "step", "param_groups") if a[key] != b[key]]
    found += [name for name in {**a["model"], **b["model"]} if not torch.equal(a["model"][name], b["model"][name])]
    for name in {**a["optimizer"], **b["optimizer"]}:
        ours, theirs = a["optimizer"][name], b["optimizer"][name]
        found += [(name, key) for key in {**ours, **theirs} if ours[key].dtype != theirs[key].dtype
                  or not torch.equal(ours[key], theirs[key])]
    return found


def parameters_of(engine):
    with engine.gathered() if engine.stage == 3 else contextlib.nullcontext():
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def alone(directory, stage=0, **options):
    """The state_dict of what one rank loads."""
    engine = make(FakeCommunicator(0, 1), stage, seed=7, **options)
    engine.load(directory)
    return engine.state_dict()


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
        wrong[key, stage] += [] if engine.param_groups[0]["lr"] == 0.9**2 * OPTIMIZERS[optimizer].keywords["lr"] else [
            "lr"]
    return {key: found for key, found in wrong.items() if found}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_stage_and_world_loads_what_any_other_saved(tmp_path, optimizer):
    expected = {}
    for world_size in (1, 2, 3, 4):
        expected |= launch(saved, world_size, tmp_path, optimizer)[0]
    for world_size in (1, 2, 3, 4):
        assert launch(loaded, world_size, tmp_path, optimizer, expected) == [{}] * world_size


def continued(comm, folder):
    """Six steps with a save after three; each stage from there; and a stage that forgets the random numbers."""
    train(engine := make(comm, 2), 3).save(folder)
    expected, found = parameters_of(train(engine, 3, first=3)), {}
    for stage in range(4):
        engine = make(comm, stage, seed=7)
        engine.load(folder)
        found[stage] = parameters_of(train(engine, 3, first=3))
    engine = make(comm, 2, seed=7)
    engine.load(folder)
    torch.manual_seed(8)
    return expected, found, parameters_of(train(engine, 3, first=3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_to_the_bit(tmp_path, world_size):
    for expected, found, forgetful in launch(continued, world_size, tmp_path):
        for ours in found.values():
            assert all(torch.equal(ours[name], p) for name, p in expected.items())
        assert not torch.equal(forgetful["one.weight"], expected["one.weight"])


# --- dtypes and sizes ------------------------------------------------------------------------------------------------


def low(comm, folder):
    """A bf16 model with masters; back, to fp32, and an fp32 one to bf16 with masters."""
    low, found = torch.bfloat16, {}
    engine = train(make(comm, 2, dtype=low), 2)
    engine.save(folder / "low")
    expected, rounded = engine.state_dict(), parameters_of(engine)
    for stage, dtype in ((1, low), (3, low)):
        engine = make(comm, stage, seed=7, dtype=dtype)
        engine.load(folder / "low")
        assert all(p.dtype == low and torch.equal(p, rounded[name]) for name, p in parameters_of(engine).items())
        found[stage, dtype] = differing(engine.state_dict(), expected)
    engine = make(comm, 0, seed=7)
    engine.load(folder / "low")
    found[0, None] = differing(engine.state_dict(), expected and {**expected, "model": {
        name: x.float() if x.is_floating_point() else x for name, x in expected["model"].items()}})
    with pytest.raises(CheckpointError, match=r"one.weight: \(10, 10\) bfloat16 with a master in float32, here "
                                              r"\(10, 10\) bfloat16;"):
        make(comm, 0, dtype=low).load(folder / "low")
    return expected and expected["model"]["one.weight"].dtype, found


def test_16_bit_parameters_are_saved_as_their_masters(tmp_path):
    (dtype, found), _ = launch(low, 2, tmp_path)
    assert dtype == torch.float32 and found == dict.fromkeys(found, [])


class Plain(nn.Module):
    """Nothing but a linear layer, in which an fp32 checkpoint fits a bf16 model: no buffers to be rounded."""

    def __init__(self, *shape):
        super().__init__()
        self.layer = nn.Linear(*shape, bias=False)

    def forward(self, x):
        return self.layer(x)


def plain(comm, stage, dtype=None, shape=(8, 8), seed=0, optimizer=torch.optim.Adam, make=ENGINES.__getitem__):
    torch.manual_seed(seed)
    engine = make(stage)(Plain(*shape).to(dtype), comm, optimizer, bucket_bytes=500)
    x = torch.ones(2, shape[0]).to(dtype)
    engine.backward(engine.forward(x).square().mean())
    engine.step()
    return engine


def test_fp32_goes_into_masters(tmp_path):
    comm = FakeCommunicator(0, 1)
    engine = plain(comm, 3)
    engine.save(tmp_path)
    other = plain(comm, 1, torch.bfloat16, seed=7)
    other.load(tmp_path)
    assert differing(other.state_dict(), engine.state_dict()) == []
    assert torch.equal(other.model.layer.weight, engine.state_dict()["model"]["layer.weight"].bfloat16())


def crowded(comm, folder):
    """One element on four ranks."""
    engine = plain(comm, 3, shape=(1, 1))
    engine.save(folder)
    other = plain(comm, 2, shape=(1, 1), seed=7)
    other.load(folder)
    return differing(engine.state_dict(), other.state_dict())


def test_more_ranks_than_parameters(tmp_path):
    assert launch(crowded, 4, tmp_path)[0] == []
    assert alone_plain(tmp_path)["optimizer"]["layer.weight"]["step"] == 1


def alone_plain(folder, stage=0):
    engine = plain(FakeCommunicator(0, 1), stage, shape=(1, 1), seed=9)
    engine.load(folder)
    return engine.state_dict()


# --- bytes -----------------------------------------------------------------------------------------------------------


class EachWritesAll(DataParallel):
    """The mutant: what all ranks hold, all ranks write."""

    def _shared_out(self):
        return self._held()


def sizes(comm, folder):
    found = {}
    for stage in range(4):
        plain(comm, stage, shape=(64, 64)).save(folder / f"{stage}")
        train(make(comm, stage), 1).save(folder / f"{stage} odd")
    with contextlib.suppress(KeyError, RuntimeError):
        plain(comm, 0, shape=(64, 64), make=lambda _: EachWritesAll).save(folder / "mutant")
    for name in os.listdir(folder):
        for path, _, files in os.walk(folder / name):
            found.setdefault(name, {}).update({f: os.path.getsize(os.path.join(path, f)) for f in files})
        found[name].pop("manifest.json", None)
    return found


def test_files_have_the_bytes_of_the_closed_form(tmp_path):
    found, *_ = launch(sizes, 3, tmp_path)
    for stage in range(4):
        expected = checkpoint_bytes(Plain(64, 64), 3, stage, bucket_bytes=500)
        assert found[f"{stage}"] == expected != found["mutant"]
        share = sum(expected.values()) - 3 * 5056
        assert 64 * 64 * 12 < share < 64 * 64 * 12 + 3 * 400  # Ψ · (4 + 8), and headers
        assert found[f"{stage} odd"] == checkpoint_bytes(build(), 3, stage, bucket_bytes=500)
    assert sum(found["mutant"].values()) > 2.5 * sum(found["0"].values())


def peaks(folder, stage):
    """Bytes above what was there before, in save and in load."""
    torch.manual_seed(0)
    model, found = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8))), []
    engine = ENGINES[stage](model, FakeCommunicator(0, 1), OPTIMIZERS["adamw"], bucket_bytes=3 * 128 * 128 * 4)
    engine.backward(engine.forward(torch.ones(1, 128)).sum())
    engine.step()
    for work in (engine.save, engine.load):
        with memory.track(engine.model, engine.optimizer) as t:
            before = t.now.total
            work(folder)
        found.append(t.peak.total - before)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_copy_of_everything_is_made(tmp_path, monkeypatch, stage):
    save, load = peaks(tmp_path / "whole", stage)
    piece = 128 * 128 * 4
    assert save < 20_000 and piece <= load <= 2 * piece + 20_000  # a file's tensor in memory, and the one before
    cut, copy = checkpoint.elements, checkpoint._copy
    monkeypatch.setattr(checkpoint, "elements", lambda *args: cut(*args).clone())
    hoard = []
    monkeypatch.setattr(checkpoint, "_copy", lambda stored, name, *args: (
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


# --- what is refused -------------------------------------------------------------------------------------------------


def only(directory, pattern):
    """The one file that is called so, in the folder of the checkpoint."""
    path, = directory.glob(f"step-*/{pattern}")
    return path


def cut(directory):
    os.truncate(only(directory, "rank-00001*"), 4000)


def flip(directory):
    path = only(directory, "rank-00000*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited(change):
    def edit(directory):
        path = directory / "manifest.json"
        told = json.loads(path.read_text())
        change(told)
        path.write_text(json.dumps(told))
    return edit


def rehash(told):
    told.pop("sha256")
    told["sha256"] = manifest._digest(told)


class Trojan:
    """Its unpickling leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def trojan(directory):
    """A pickle in place of a file, with bytes and hash in the manifest as they should be; and beside it."""
    path, data = only(directory, "rank-00001*"), pickle.dumps(Trojan(str(directory / "opened")))
    path.write_bytes(data)
    (directory / "data.pkl").write_bytes(data)
    torch.save(Trojan(str(directory / "opened")), directory / "optimizer.pt")

    def tell(told):
        told["files"][path.name] |= {"bytes": len(data), "sha256": durable.sha256_of(path)}
        rehash(told)
    edited(tell)(directory)


DAMAGE = {
    "the manifest gone": (lambda d: os.remove(d / "manifest.json"), r"manifest.json is missing"),
    "a file gone": (lambda d: os.remove(only(d, "rank-00001*")), r"rank-00001.safetensors is missing"),
    "the rest gone": (lambda d: os.remove(only(d, "rest*")), r"rest.safetensors is missing"),
    "cut short": (cut, r"rank-00001.safetensors has 4000 bytes: expected \d+; it was cut short"),
    "a bit flipped": (flip, r"rank-00000.safetensors is damaged: its SHA-256 is"),
    "a manifest edited": (edited(lambda told: told["groups"][0]["hyperparameters"].update(lr=1.0)),
                          r"manifest.json was changed after it was written"),
    "no manifest at all": (lambda d: (d / "manifest.json").write_text("{"), r"manifest.json is damaged"),
    "another format": (edited(lambda told: told.update(format=9)), r"manifest.json is of format 9: expected 1"),
    "a trojan": (trojan, r"rank-00001.safetensors is no safetensors file"),
}


def refused(comm, folder, copies):
    """What each rank says to a damaged checkpoint, and whether its engine is as before."""
    said = {}
    for stage in (1, 3):
        engine = train(make(comm, stage, seed=7), 1)
        before = engine.state_dict()
        for name in copies:
            with pytest.raises(CheckpointError) as error:
                engine.load(folder / name)
            said[name] = str(error.value), differing(engine.state_dict(), before)
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    launch(lambda comm: train(make(comm, 2), 2).save(folder), 2)
    return folder


def test_what_is_damaged_is_named_by_all_ranks_and_nothing_changes(whole, tmp_path):
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(whole, tmp_path / name)
        damage(tmp_path / name)
    first, second = launch(refused, 2, tmp_path, list(DAMAGE))
    for name, (_, expected) in DAMAGE.items():
        assert re.search(expected, first[name][0])
        assert first[name] == (second[name][0], [])
        assert str(tmp_path / name) in first[name][0]
    assert not (tmp_path / "a trojan" / "opened").exists()


def test_another_model_optimizer_or_grouping(whole):
    comm = FakeCommunicator(0, 1)
    other = build()
    other.two = nn.Linear(WIDTH, 3)
    other.three.requires_grad_(True)
    wrong = {
        r"two.weight: absent, here \(3, 10\) float32": Zero1(other, comm, OPTIMIZERS["adamw"], groups=two_groups),
        r"three.weight: \(10, 10\) float32, not trained, here \(10, 10\) float32;":
            Zero1(other, comm, OPTIMIZERS["adamw"], groups=two_groups),
        r"its optimizer is torch.optim.adamw.AdamW, here torch.optim.sgd.SGD": make(comm, 1, "momentum"),
        r"its param groups have 1 \+ 3 parameters, here 4": Zero2(build(), comm, OPTIMIZERS["adamw"]),
        r"its param groups are of other parameters": Zero3(build(), comm, OPTIMIZERS["adamw"], groups=lambda named: [
            {"params": [named[0][1]]}, {"params": [p for _, p in reversed(named[1:])]}]),
    }
    for expected, engine in wrong.items():
        with pytest.raises(CheckpointError, match=f"manifest.json is of something else: .*{expected}"):
            engine.load(whole)


def unfinished(comm, folder):
    said = []
    for stage in range(4):
        engine = train(make(comm, stage), 1)
        engine.save(folder)
        engine.backward(engine.forward(torch.ones(2, WIDTH)).mean())
        for work in (lambda engine=engine: engine.save(folder), engine.state_dict):
            with pytest.raises(RuntimeError, match="after 1 micro-batches of a step") as error:
                work()
            said.append(str(error.value))
        engine.step()
        engine.save(folder)
    return said


def test_gradients_are_not_forgotten(tmp_path):
    for said in launch(unfinished, 2, tmp_path):
        assert set(said) == {f"{doing} after 1 micro-batches of a step, and their gradients would be lost: call "
                             "engine.step() or engine.zero_grad() first" for doing in ("save", "state_dict")}
    assert alone(tmp_path)["step"] == 2


# --- errors on one rank ----------------------------------------------------------------------------------------------


def full(comm, folder, rank):
    """A disk that is full for one rank, at each of its writes; then it is not."""
    engine, said, sync = train(make(comm, 2), 1), [], os.fsync
    engine.save(folder)
    train(engine, 1, first=1)
    for nth in itertools.count(1):
        calls = itertools.count(1)

        def fails(fd, calls=calls, nth=nth):
            if next(calls) == nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(fd)
        os.fsync = fails if comm.rank == rank else sync
        try:
            engine.save(folder)
        except (OSError, RankError) as error:
            said.append(str(error))
        else:
            return said, differing(alone(folder), engine.state_dict())
        finally:
            os.fsync = sync
        if comm.rank == rank:
            said.append(alone(folder)["step"])
        comm.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_what_was(tmp_path, rank):
    answers = launch(full, 2, tmp_path, rank)
    assert answers[0][1] == []
    told, steps = answers[1 - rank][0], answers[rank][0][1::2]
    assert set(told) == {f"rank {rank} raised OSError: [Errno 28] No space left on device"}
    assert len(told) == (6 if rank == 0 else 2)  # folder's name, files, their names, manifest, its name
    assert steps == [1, 1, 1, 1, 1, 2] if rank == 0 else [1, 1]
    assert len(list(tmp_path.glob("step-*"))) == 1  # the save that worked has cleaned up after the others


def elsewhere(comm, folder):
    train(make(comm, 2), 1).save(folder / f"{comm.rank}")


def test_ranks_that_do_not_see_the_same_files(tmp_path):
    with pytest.raises(RankError, match="step-00000001.*, which rank 0 has made, is not there: save to a file sys"):
        launch(elsewhere, 2, tmp_path)


def test_ranks_that_differ_are_named(tmp_path):
    def differ(comm):
        engine = make(comm, 2)
        engine.save(tmp_path) if comm.rank else engine.load(tmp_path)

    with pytest.raises(RankError, match=r"ranks \[1\] are elsewhere than rank 0: rank 0: load .*rank 1: save"):
        launch(differ, 2)
