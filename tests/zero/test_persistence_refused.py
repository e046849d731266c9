"""Saved states that are not loaded, or not written: damaged ones, those of another model, those that lose gradients."""

import errno
import itertools
import os
import pickle
import re
import shutil
import time

import pytest
import torch
from torch import nn
from zero_saving_kit import (
    OPTIMIZERS,
    WIDTH,
    alone,
    build,
    check_damage,
    differing,
    edited,
    make,
    only,
    rehash,
    train,
    two_groups,
)

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.saving import durable, sharded
from refimpl.zero import SavedStateError, Zero1, Zero2, Zero3


def cut(directory):
    os.truncate(only(directory, "rank-00001*"), 4000)


def flip(directory):
    path = only(directory, "rank-00000*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
    "the first file gone": (lambda d: os.remove(only(d, "rank-00000*")), r"rank-00000.safetensors is missing"),
    "cut short": (cut, r"rank-00001.safetensors has 4000 bytes: expected \d+; it was cut short"),
    "a bit flipped": (flip, r"rank-00000.safetensors is damaged: its SHA-256 is"),
    "a manifest edited": (edited(lambda content: content["groups"][0]["hyperparameters"].update(lr=1.0)),
                          r"manifest.json was changed after it was written"),
    "no manifest at all": (lambda d: (d / "manifest.json").write_text("{"), r"manifest.json is damaged"),
    "another format": (edited(lambda content: content.update(format=9)), r"manifest.json is of format 9: expected 2"),
    "a trojan": (trojan, r"rank-00001.safetensors is no safetensors file"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A state that two ranks have saved."""
    folder = tmp_path_factory.mktemp("whole")
    launch(lambda comm: train(make(comm, 2), 2).save(folder), 2)
    return folder


def test_what_is_damaged_is_named_by_all_ranks_and_nothing_changes(whole, tmp_path):
    check_damage(DAMAGE, whole, tmp_path, launch)
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
        with pytest.raises(SavedStateError, match=f"manifest.json does not fit what is trained here: .*{expected}"):
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
    expected = rf"rank {rank} raised OSError: \[Errno 28\] No space left on device: '{re.escape(str(tmp_path))}(.*)'"
    files = [re.fullmatch(expected, message)[1] for message in messages]
    steps_folder = r"/step-0000000\d-\w{8}"
    assert all(map(re.fullmatch, ("", f"{steps_folder}/rank-00000.safetensors", steps_folder,
                                  "/manifest.json.tmp", "") if rank == 0 else (
                                      f"{steps_folder}/rank-00001.safetensors", steps_folder), files)), files
    assert len(messages) == (5 if rank == 0 else 2)  # folder's name, file, its name, manifest, its name
    assert steps == [1, 1, 1, 1, 2] if rank == 0 else [1, 1]
    assert len(list(tmp_path.glob("step-*"))) == 1  # the save that worked has cleaned up after the others


def errors(comm, folder):
    """{what goes wrong: what a rank says of it}."""
    engine, said, targets = train(make(comm, 2), 1), {}, sharded.make_state
    engine.save(folder / "saved")
    before = engine.state_dict()

    def tell(name, work):
        comm.barrier()
        with pytest.raises((OSError, RankError)) as error:
            work()
        said[name] = type(error.value).__name__, str(error.value), differing(engine.state_dict(), before)

    if comm.rank == 0:
        (folder / "file").touch()
        (folder / "no manifest" / "manifest.json").mkdir(parents=True)
        (folder / "folder").mkdir()
    tell("saved in a file", lambda: engine.save(folder / "file"))
    tell("a folder for a manifest", lambda: engine.load(folder / "no manifest"))
    tell("weights in place of a folder", lambda: engine.save_weights(folder / "folder"))
    tell("weights below a file", lambda: engine.save_weights(folder / "file" / "weights"))


    def when_it_has_gone(*args):
        if comm.rank == 1:
            shutil.rmtree(folder / "saved", ignore_errors=True)  # once for each shard
        while (folder / "saved").exists():
            time.sleep(0.01)
        return targets(*args)
    sharded.make_state = when_it_has_gone
    try:
        tell("a folder that goes", lambda: engine.load(folder / "saved"))
    finally:
        sharded.make_state = targets
    return said


def test_errors_of_files_name_the_file(tmp_path):
    answers = launch(errors, 2, tmp_path)
    expected = {"saved in a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder for a manifest": (None, "IsADirectoryError", f"{tmp_path}/no manifest/manifest.json"),
                "weights in place of a folder": (0, "IsADirectoryError", f"{tmp_path}/folder"),
                "weights below a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder that goes": (None, "FileNotFoundError", f"{tmp_path}/saved/step-00000001-")}
    for name, (raises, kind, path) in expected.items():
        for rank, said in enumerate(answers):
            own = raises in (rank, None)
            assert said[name][0] == (kind if own else "RankError"), said[name]
            assert kind in "".join(said[name][:2]) and path in said[name][1], said[name]
            assert name == "a folder that goes" or said[name][2] == []
    assert not list(tmp_path.glob("**/*.tmp"))


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
