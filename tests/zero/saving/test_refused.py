"""Saved states that are not loaded, or not written: damaged ones, those of another model, those that lose gradients."""

import errno
import itertools
import json
import os
import pickle
import re
import shutil

import pytest
import torch
from torch import nn
from zero_saving_kit import OPTIMIZERS, WIDTH, alone, build, differing, make, train, two_groups

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.zero import SavedStateError, Zero1, Zero2, Zero3
from refimpl.zero.saving import durable, manifest


def only(directory, pattern):
    """The one file of this name in the folder of the saved state."""
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
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return edit


def rehash(content):
    content.pop("sha256")
    content["sha256"] = manifest._digest(content)


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

    def rewrite(content):
        content["files"][path.name] |= {"bytes": len(data), "sha256": durable.sha256_of(path)}
        rehash(content)
    edited(rewrite)(directory)


DAMAGE = {
    "the manifest gone": (lambda d: os.remove(d / "manifest.json"), r"manifest.json is missing"),
    "a file gone": (lambda d: os.remove(only(d, "rank-00001*")), r"rank-00001.safetensors is missing"),
    "the rest gone": (lambda d: os.remove(only(d, "rest*")), r"rest.safetensors is missing"),
    "cut short": (cut, r"rank-00001.safetensors has 4000 bytes: expected \d+; it was cut short"),
    "a bit flipped": (flip, r"rank-00000.safetensors is damaged: its SHA-256 is"),
    "a manifest edited": (edited(lambda content: content["groups"][0]["hyperparameters"].update(lr=1.0)),
                          r"manifest.json was changed after it was written"),
    "no manifest at all": (lambda d: (d / "manifest.json").write_text("{"), r"manifest.json is damaged"),
    "another format": (edited(lambda content: content.update(format=9)), r"manifest.json is of format 9: expected 1"),
    "a trojan": (trojan, r"rank-00001.safetensors is no safetensors file"),
}


def refused(comm, folder, copies):
    """What each rank says to a damaged saved state, and whether its engine is as before."""
    said = {}
    for stage in (1, 3):
        engine = train(make(comm, stage, seed=7), 1)
        before = engine.state_dict()
        for name in copies:
            with pytest.raises(SavedStateError) as error:
                engine.load(folder / name)
            said[name] = str(error.value), differing(engine.state_dict(), before)
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A state that two ranks have saved."""
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
        with pytest.raises(SavedStateError, match=f"manifest.json does not fit this engine: .*{expected}"):
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
    messages, steps = answers[1 - rank][0], answers[rank][0][1::2]
    assert set(messages) == {f"rank {rank} raised OSError: [Errno 28] No space left on device"}
    assert len(messages) == (6 if rank == 0 else 2)  # folder's name, files, their names, manifest, its name
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
