"""Saved states that are not loaded, or not written, by holders of any kind: damage, errors on one rank, weights.

A kind is a pair: what makes a holder on a communicator, and what trains it for so many steps more.
"""

import contextlib
import errno
import itertools
import json
import os
import pickle
import re
import shutil
import time
from unittest import mock

import pytest
import torch
from rank_pool import pooled
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from saving_kit import BY_COLUMNS, Holder, differing, make, train

from refimpl.comm import FakeCommunicator, RankError
from refimpl.saving import SavedStateError, durable, manifest, sharded

BY_HAND, ZERO = (Holder, Holder.train), (make, train)
BOTH_WAYS = {BY_HAND: ({}, {"dims": BY_COLUMNS, "tp": 2}), ZERO: ({"stage": 1}, {"stage": 3})}


def only(directory, pattern):
    """The one file of this name in the folder of the saved state."""
    path, = directory.glob(f"step-*/{pattern}")
    return path


def edited(change):
    def edit(directory):
        path = directory / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return edit


def rewritten(change):
    """The manifest changed, and its hash with it."""
    def rewrite(content):
        change(content)
        content.pop("sha256")
        content["sha256"] = manifest._digest(content)
    return edited(rewrite)


def hashed(path):
    """Give the manifest the bytes and the hash of a file that was changed."""
    rewritten(lambda content: content["files"][path.name].update(
        bytes=path.stat().st_size, sha256=durable.sha256_of(path)))(path.parent.parent)


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
    hashed(path)


DAMAGE = {
    "the manifest gone": (lambda d: os.remove(d / "manifest.json"), r"manifest.json is missing"),
    "a file gone": (lambda d: os.remove(only(d, "rank-00001*")), r"rank-00001.safetensors is missing"),
    "the first file gone": (lambda d: os.remove(only(d, "rank-00000*")), r"rank-00000.safetensors is missing"),
    "cut short": (lambda d: os.truncate(only(d, "rank-00001*"), 4000),
                  r"rank-00001.safetensors has 4000 bytes: expected \d+; it was cut short"),
    "a bit flipped": (flip, r"rank-00000.safetensors is damaged: its SHA-256 is"),
    "a manifest edited": (edited(lambda content: content["groups"][0]["hyperparameters"].update(lr=1.0)),
                          r"manifest.json was changed after it was written"),
    "no manifest at all": (lambda d: (d / "manifest.json").write_text("{"), r"manifest.json is damaged"),
    "another format": (edited(lambda content: content.update(format=9)), r"manifest.json is of format 9: expected 2"),
    "the format before": (edited(lambda content: content.update(format=1)), r"manifest.json is of format 1: expected"),
    "a trojan": (trojan, r"rank-00001.safetensors is no safetensors file")}


def refused(comm, kind, folder, copies):
    """What each rank says to a damaged saved state, and whether it holds what it held before."""
    (make, train), said = kind, {}
    for how in BOTH_WAYS[kind]:
        holder = train(make(comm, seed=7, **how), 1)
        before = holder.state_dict()
        for name in copies:
            with pytest.raises(SavedStateError) as error:
                holder.load(folder / name)
            said[name] = str(error.value), differing(holder.state_dict(), before)
    return said


def check_damage(damages, whole, folder, kind=BY_HAND):
    """All ranks name what is damaged, {name: (function of a copy's directory, what is said)}, and stay as they were."""
    for name, (damage, _) in damages.items():
        shutil.copytree(whole, folder / name)
        damage(folder / name)
    first, second = pooled(refused, 2, kind, folder, list(damages))
    for name, (_, expected) in damages.items():
        assert re.search(expected, first[name][0]), (name, first[name])
        assert first[name] == (second[name][0], []), name
        assert str(folder / name) in first[name][0], name
    assert not list(folder.glob("**/opened"))


def full_disk(nth=None):
    """A region in which this process finds no room left at its nth fsync; without a number at each."""
    calls, sync = itertools.count(1), os.fsync

    def fsync(fd):
        if nth in (None, next(calls)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)
    return mock.patch.object(os, "fsync", fsync)


def saved_on_a_full_disk(comm, kind, folder, rank):
    """A disk that is full for one rank, at each of its writes; then it is not."""
    (make, train), said = kind, []
    holder = train(make(comm), 1)
    holder.save(folder)
    train(holder, 1)

    def found():
        alone = make(FakeCommunicator(0, 1), seed=3)
        alone.load(folder)
        return alone.state_dict()

    for nth in itertools.count(1):
        try:
            with full_disk(nth) if comm.rank == rank else contextlib.nullcontext():
                holder.save(folder)
        except (OSError, RankError) as error:
            said.append(str(error))
        else:
            return said, differing(found(), holder.state_dict()), list(getattr(holder, "now", ()))
        if comm.rank == rank:
            said.append(found()["step"])
        comm.barrier()


def check_a_full_disk(kind, folder, rank):
    """An error on one rank is one on all, and leaves what was."""
    answers = pooled(saved_on_a_full_disk, 2, kind, folder, rank)
    assert answers[0][1:] == ([], []) and answers[1][2] == []
    messages, steps = answers[1 - rank][0], answers[rank][0][1::2]
    expected = rf"rank {rank} raised OSError: \[Errno 28\] No space left on device: '{re.escape(str(folder))}(.*)'"
    files, new = [re.fullmatch(expected, message)[1] for message in messages], r"/step-0000000\d-\w{8}"
    names = (["", f"{new}/rank-00000.safetensors", new, r"/manifest\.json\.\w{8}\.tmp", ""] if rank == 0 else
             [f"{new}/rank-00001.safetensors", new])  # folder's name, file, its name, manifest, its name
    assert len(files) == len(names) and all(map(re.fullmatch, names, files)), files
    assert steps == [1, 1, 1, 1, 2] if rank == 0 else [1, 1]
    assert len(list(folder.glob("step-*"))) == 1  # the save that worked has cleaned up after the others


def errors_of_files(comm, kind, folder):
    """{what goes wrong: what a rank says of it}."""
    (make, train), said, make_state = kind, {}, sharded.make_state
    holder = train(make(comm), 1)
    holder.save(folder / "saved")
    before = holder.state_dict()

    def tell(name, work, *given):
        comm.barrier()
        with pytest.raises((OSError, RankError)) as error:
            work(*given)
        said[name] = type(error.value).__name__, str(error.value), differing(holder.state_dict(), before)

    if comm.rank == 0:
        (folder / "file").touch()
        (folder / "no manifest" / "manifest.json").mkdir(parents=True)
        (folder / "folder").mkdir()
    tell("saved in a file", holder.save, folder / "file")
    tell("a folder for a manifest", holder.load, folder / "no manifest")
    tell("weights in place of a folder", holder.save_weights, folder / "folder")
    tell("weights below a file", holder.save_weights, folder / "file" / "weights")

    def when_it_has_gone(*args):
        if comm.rank == 1:
            shutil.rmtree(folder / "saved", ignore_errors=True)  # once for each shard
        while (folder / "saved").exists():
            time.sleep(0.01)
        return make_state(*args)
    with mock.patch.object(sharded, "make_state", when_it_has_gone):
        tell("a folder that goes", holder.load, folder / "saved")
    return said, list(getattr(holder, "now", ()))


def check_errors_of_files(kind, folder):
    """They name the file, and change nothing."""
    answers = pooled(errors_of_files, 2, kind, folder)
    expected = {"saved in a file": (0, "FileExistsError", f"{folder}/file"),
                "a folder for a manifest": (None, "IsADirectoryError", f"{folder}/no manifest/manifest.json"),
                "weights in place of a folder": (0, "IsADirectoryError", f"{folder}/folder"),
                "weights below a file": (0, "FileExistsError", f"{folder}/file"),
                "a folder that goes": (None, "FileNotFoundError", f"{folder}/saved/step-00000001-")}
    for name, (raises, error, path) in expected.items():
        for rank, (said, now) in enumerate(answers):
            raised, text, changed = said[name]
            assert raised == (error if raises in (rank, None) else "RankError"), said[name]
            assert error in raised + text and path in text, said[name]
            assert now == [] and (name == "a folder that goes" or changed == [])
    assert not list(folder.glob("**/*.tmp"))


def check_other_folders(kind, folder):
    """Ranks that do not see the same files."""
    make, train = kind
    with pytest.raises(RankError, match="step-00000001.*, which rank 0 has made, is not there: save to a file sys"):
        pooled(lambda comm: train(make(comm), 1).save(folder / f"{comm.rank}"), 2)


def loading_what_does_not_fit(comm, make, train):
    holder, said = train(make(comm), 2), []
    sd = holder.state_dict()
    wrong = [{}, {**sd, "class": "torch.optim.sgd.SGD"} if sd else {},
             {**sd, "model": {name: x for name, x in sd["model"].items() if name != "norm.weight"}} if sd else {},
             {**sd, "model": {**sd["model"], "seen": torch.zeros(2)}} if sd else {}]
    for each in wrong:
        with pytest.raises(SavedStateError) as error:
            holder.load_state_dict(each)
        said.append(str(error.value))
    return said, differing(sd, holder.state_dict())


def check_state_dicts_that_do_not_fit(kind, norm):
    """They are refused by all. `norm`: the shape of norm.weight, as it is said."""
    first, second = pooled(loading_what_does_not_fit, 2, *kind)
    assert first[0] == second[0] and first[1] == []
    for said, expected in zip(first[0], ("has no 'model': expected what state_dict returned",
                                         "its optimizer is torch.optim.sgd.SGD, here torch.optim.adamw.AdamW",
                                         f"norm.weight: absent, here {norm} float32",
                                         "seen: (2,) float32, not trained, here () int64, not trained"), strict=True):
        assert expected in said


def check_weights(path, held, plain, tied, kept):
    """The file is what was held, in the dtypes of a plain model, which loads it; `tied` is there as `kept` alone."""
    loaded, expected = load_file(path), plain.state_dict()
    assert tied not in loaded and loaded.keys() | {tied} == held.keys()
    assert all(torch.equal(x, held[name].to(expected[name].dtype)) for name, x in loaded.items())
    assert plain.load_state_dict(loaded, strict=False) == ([tied], [])
    load_model(plain, path)
    assert torch.equal(plain.get_parameter(tied), loaded[kept])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def weights_on_a_full_disk(comm, make, train, path):
    """Rank 0 cannot write the second time; the third it can."""
    holder, said = train(make(comm), 2), []
    holder.save_weights(path)
    before = path.read_bytes()
    for disk in (full_disk(), contextlib.nullcontext()):
        train(holder, 1)
        try:
            with disk:
                holder.save_weights(path)
        except (OSError, RankError) as error:
            said.append((type(error).__name__, str(error)))
        said.append(path.read_bytes() == before)
        comm.barrier()
    return said, list(getattr(holder, "now", ()))


def check_weights_on_a_full_disk(kind, folder):
    """The file that was stays."""
    (first, now), (second, _) = pooled(weights_on_a_full_disk, 2, *kind, folder / "weights.safetensors")
    expected = rf"\[Errno 28\] No space left on device: '{re.escape(str(folder))}/weights\.safetensors\.\w{{8}}\.tmp'"
    (kind, text), *unchanged = first
    assert kind == "OSError" and re.fullmatch(expected, text) and unchanged == [True, False] and now == []
    (kind, text), *unchanged = second
    assert kind == "RankError" and re.fullmatch(f"rank 0 raised OSError: {expected}", text)
    assert unchanged == [True, False]
    assert os.listdir(folder) == ["weights.safetensors"]  # and no temporary file
