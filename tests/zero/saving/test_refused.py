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
from safetensors.torch import load_file, save_file
from torch import nn
from zero_saving_kit import OPTIMIZERS, WIDTH, alone, build, differing, make, train, two_groups

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.zero import SavedStateError, Zero1, Zero2, Zero3
from refimpl.zero.saving import durable, manifest, sharded


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


def rewritten(change):
    """The manifest changed, and its hash with it."""
    return edited(lambda content: (change(content), rehash(content)))


def pieces(content, rank):
    return content["files"][f"rank-0000{rank}.safetensors"]["pieces"]


def without(directory, name):
    """A file without one of its tensors, with its bytes and hash in the manifest."""
    path = only(directory, "rank-00000*")
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors, path)
    rewritten(lambda content: content["files"][path.name].update(
        bytes=path.stat().st_size, sha256=durable.sha256_of(path)))(directory)


def linked(directory, what):
    """A part of the saved state is a link to elsewhere."""
    path = only(directory, "rank-00000*") if what == "file" else only(directory, "rank-00000*").parent
    elsewhere = directory.parent / f"{directory.name} elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def renamed(old, new):
    return rewritten(lambda content: content["files"].update({new: content["files"].pop(old)}))


GAPS = {  # hashes are right, so that only what is in them can tell
    "no second file": (rewritten(lambda c: c["files"].pop("rank-00001.safetensors")),
                       r"files has 1 of rank-00000.safetensors to rank-00001"),
    "no rest": (rewritten(lambda c: c["files"].pop("rest.safetensors")), r"files.rest.safetensors is missing"),
    "no piece": (rewritten(lambda c: pieces(c, 0).pop("one.bias")), r"one.bias: elements 0 … \d+ are in no file"),
    "no last piece": (rewritten(lambda c: pieces(c, 1).pop("one.weight")), r"one.weight: elements \d+ … 99 are in no "),
    "a short piece": (rewritten(lambda c: pieces(c, 1)["one.weight"].__setitem__(1, 99)),
                      r"one.weight: elements 99 … 99 are in no file"),
    "a piece twice": (rewritten(lambda c: pieces(c, 1).update(scale=[0, 1]) or pieces(c, 0).update(scale=[0, 1])),
                      r"scale: elements 0 … 0 are in rank-00000.safetensors and in rank-00001.safetensors"),
    "a long piece": (rewritten(lambda c: pieces(c, 1)["one.weight"].__setitem__(1, 101)),
                     r"pieces.one.weight is \[\d+, 101\]: expected a part of its 100 elements"),
    "a piece that is shifted": (rewritten(lambda c: (pieces(c, 0)["one.weight"].__setitem__(1, 36),
                                                     pieces(c, 1)["one.weight"].__setitem__(0, 36))),
                                r"safetensors has parameters/one.weight as F32 \[\d+\]: expected float32 \[\d+\]"),
    "no such parameter": (rewritten(lambda c: pieces(c, 1).update(x=[0, 1])), r"pieces.x is there, and no such param"),
    "no moments": (rewritten(lambda c: c["states"]["one.weight"].pop("exp_avg")),
                   r"has optimizer/exp_avg/one.weight: manifest.json says otherwise"),
    "no tensor": (lambda d: without(d, "optimizer/exp_avg/one.weight"),
                  r"rank-00000.safetensors has no optimizer/exp_avg/one.weight: manifest.json says otherwise"),
    "no generator": (lambda d: without(d, "rng/cpu"), r"rank-00000.safetensors has no rng/cpu"),
    "other moments": (rewritten(lambda c: c["states"]["one.weight"]["exp_avg"].update(dtype="int32")),
                      r"has optimizer/exp_avg/one.weight as F32 \[\d+\]: expected int32"),
    "no lr": (rewritten(lambda c: c["groups"][0]["hyperparameters"].pop("lr")), r"lr of its param group 0 is missing"),
    "a word for lr": (rewritten(lambda c: c["groups"][1]["hyperparameters"].update(lr="high")),
                      r"lr of its param group 1 is 'high': expected a number"),
    "one beta": (rewritten(lambda c: c["groups"][0]["hyperparameters"].update(betas=[0.9])),
                 r"betas of its param group 0 is \[0.9\]: expected \[a number, a number\]"),
    "a function for a dtype": (rewritten(lambda c: c["parameters"]["one.bias"].update(held="load")),
                               r"parameters.one.bias.held is 'load': expected the name of a dtype"),
    "an absolute folder": (rewritten(lambda c: c.update(folder="/tmp")), r"folder is '/tmp': expected the name of a"),
    "a folder above": (rewritten(lambda c: c.update(folder="../x")), r"folder is '../x': expected the name of a"),
    "an absolute file": (renamed("rank-00001.safetensors", "/etc/passwd"), r"files./etc/passwd is there: expected"),
    "a file above": (renamed("rank-00000.safetensors", "../x"), r"files.../x is there: expected rank-00000"),
    "a linked file": (lambda d: linked(d, "file"), r"rank-00000.safetensors is a link to .*, which is not in"),
    "a linked folder": (lambda d: linked(d, "folder"), r"safetensors is a link to .*, which is not in .*: copy it th"),
    "a folder for a file": (lambda d: (os.remove(only(d, "rank-00001*")), os.mkdir(next(d.glob("step-*")) /
                                       "rank-00001.safetensors")), r"rank-00001.safetensors is no file"),
}
DAMAGE = {
    **GAPS,
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
    expected = rf"rank {rank} raised OSError: \[Errno 28\] No space left on device: '{re.escape(str(tmp_path))}(.*)'"
    files = [re.fullmatch(expected, message)[1] for message in messages]
    steps_folder = r"/step-0000000\d-\w{8}"
    assert all(map(re.fullmatch, ("", f"{steps_folder}/rank-00000.safetensors", f"{steps_folder}/rest.safetensors",
                                  steps_folder, "/manifest.json.tmp", "") if rank == 0 else (
                                      f"{steps_folder}/rank-00001.safetensors", steps_folder), files)), files
    assert len(messages) == (6 if rank == 0 else 2)  # folder's name, files, their names, manifest, its name
    assert steps == [1, 1, 1, 1, 1, 2] if rank == 0 else [1, 1]
    assert len(list(tmp_path.glob("step-*"))) == 1  # the save that worked has cleaned up after the others


def errors(comm, folder):
    """{what goes wrong: what a rank says of it}."""
    engine, said, targets = train(make(comm, 2), 1), {}, sharded.load_targets
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
    if comm.rank == 1:
        sharded.load_targets = lambda *args: (shutil.rmtree(folder / "saved"), targets(*args))[1]
    try:
        tell("a folder that goes", lambda: engine.load(folder / "saved"))
    finally:
        sharded.load_targets = targets
    return said


def test_errors_of_files_name_the_file(tmp_path):
    answers = launch(errors, 2, tmp_path)
    expected = {"saved in a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder for a manifest": (None, "IsADirectoryError", f"{tmp_path}/no manifest/manifest.json"),
                "weights in place of a folder": (0, "IsADirectoryError", f"{tmp_path}/folder"),
                "weights below a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder that goes": (1, "FileNotFoundError", f"{tmp_path}/saved/step-00000001-")}
    for name, (raises, kind, path) in expected.items():
        for rank, said in enumerate(answers):
            own = raises in (rank, None)
            assert said[name][0] == (kind if own else "RankError") or name == "a folder that goes", said[name]
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
