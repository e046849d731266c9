"""Saved states that are not loaded, or not written: damage, another model, a full disk, replicas that differ."""

import errno
import itertools
import os
import pickle
import re
import shutil
import time

import pytest
import torch
from saving_kit import BY_COLUMNS, BY_ROWS, Holder, Small, alone, check_damage, differing, edited, only, rehash
from torch import nn

from refimpl import saving
from refimpl.comm import RankError, launch
from refimpl.saving import SavedStateError, TrainingState, durable, sharded
from refimpl.sharding import Shard, ShardSpec


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
    "the format before": (edited(lambda content: content.update(format=1)), r"manifest.json is of format 1: expected"),
    "a trojan": (trojan, r"rank-00001.safetensors is no safetensors file"),
}


@pytest.mark.parametrize("how", [{}, {"dims": BY_ROWS, "tp": 2}], ids=["flat", "rows"])
def test_what_is_damaged_is_named_by_all_ranks_and_nothing_changes(tmp_path, how):
    launch(lambda comm: Holder(comm, **how).train(2).save(tmp_path / "whole"), 2)
    check_damage(DAMAGE, tmp_path / "whole", tmp_path, launch)
    assert not list(tmp_path.glob("**/opened"))


# --- another model, optimizer, dtype ---------------------------------------------------------------------------------


def small(change=lambda model: None, **how):
    model = Small()
    change(model)
    return alone(build=lambda: model, **how)


def wider(model):
    model.up.bias = nn.Parameter(torch.zeros(7))


def thawed(model):
    model.still.requires_grad_(True)


def test_what_does_not_fit_is_refused_with_what_differs(tmp_path):
    alone().train(1).save(tmp_path)
    given = alone().train(1).state_dict()
    regrouped = alone()
    regrouped.names = [regrouped.names[0] + regrouped.names[1][:1], regrouped.names[1][1:]]
    swapped = alone()
    swapped.names = [[swapped.names[1][0], *swapped.names[0][1:]], [swapped.names[0][0], *swapped.names[1][1:]]]
    wrong = {
        r"up.bias: \(6,\) float32, here \(7,\) float32$": small(wider),
        r"still.weight: \(3, 4\) float32, not trained, here \(3, 4\) float32$": small(thawed),
        r"its optimizer is torch.optim.adamw.AdamW, here torch.optim.sgd.SGD": alone(optimizer="momentum"),
        r"its param groups have \d \+ \d parameters, here \d \+ \d": regrouped,
        r"its param groups are of other parameters": swapped,
    }
    for expected, holder in wrong.items():
        before = holder.state_dict()
        for load, what in ((lambda holder=holder: holder.load(tmp_path), "manifest.json"),
                           (lambda holder=holder: holder.load_state_dict(given), "the state_dict")):
            with pytest.raises(SavedStateError, match=f"{what} does not fit what is trained here: .*{expected}"):
                load()
        assert differing(holder.state_dict(), before) == []


# --- errors on one rank ----------------------------------------------------------------------------------------------


def full(comm, folder, rank):
    """A disk that is full for one rank, at each of its writes; then it is not."""
    holder, said, sync = Holder(comm).train(1), [], os.fsync
    holder.save(folder)
    holder.train(1)
    for nth in itertools.count(1):
        calls = itertools.count(1)

        def fails(fd, calls=calls, nth=nth):
            if next(calls) == nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(fd)
        os.fsync = fails if comm.rank == rank else sync
        try:
            holder.save(folder)
        except (OSError, RankError) as error:
            said.append(str(error))
        else:
            return said, differing(alone(seed=3).load(folder).state_dict(), holder.state_dict()), holder.now
        finally:
            os.fsync = sync
        if comm.rank == rank:
            said.append(alone().load(folder).step)
        comm.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_what_was(tmp_path, rank):
    answers = launch(full, 2, tmp_path, rank)
    assert answers[0][1:] == ([], []) and answers[1][2] == []
    messages, steps = answers[1 - rank][0], answers[rank][0][1::2]
    expected = rf"rank {rank} raised OSError: \[Errno 28\] No space left on device: '{re.escape(str(tmp_path))}(.*)'"
    files = [re.fullmatch(expected, message)[1] for message in messages]
    folder = r"/step-0000000\d-\w{8}"
    assert all(map(re.fullmatch, ("", f"{folder}/rank-00000.safetensors", folder, "/manifest.json.tmp", "")
                   if rank == 0 else (f"{folder}/rank-00001.safetensors", folder), files)), files
    assert len(messages) == (5 if rank == 0 else 2)  # folder's name, file, its name, manifest, its name
    assert steps == [1, 1, 1, 1, 2] if rank == 0 else [1, 1]
    assert len(list(tmp_path.glob("step-*"))) == 1  # the save that worked has cleaned up after the others


def errors(comm, folder):
    """{what goes wrong: what a rank says of it}."""
    holder, said, make_state = Holder(comm).train(1), {}, sharded.make_state
    holder.save(folder / "saved")
    before = holder.state_dict()

    def tell(name, work):
        comm.barrier()
        with pytest.raises((OSError, RankError)) as error:
            work()
        said[name] = type(error.value).__name__, str(error.value), differing(holder.state_dict(), before)

    if comm.rank == 0:
        (folder / "file").touch()
        (folder / "no manifest" / "manifest.json").mkdir(parents=True)
        (folder / "folder").mkdir()
    tell("saved in a file", lambda: holder.save(folder / "file"))
    tell("a folder for a manifest", lambda: holder.load(folder / "no manifest"))
    tell("weights in place of a folder", lambda: saving.save_weights(holder.state, folder / "folder"))
    tell("weights below a file", lambda: saving.save_weights(holder.state, folder / "file" / "weights"))

    def when_it_has_gone(*args):
        if comm.rank == 1:
            shutil.rmtree(folder / "saved", ignore_errors=True)
        while (folder / "saved").exists():
            time.sleep(0.01)
        return make_state(*args)
    sharded.make_state = when_it_has_gone
    try:
        tell("a folder that goes", lambda: holder.load(folder / "saved"))
    finally:
        sharded.make_state = make_state
    return said, holder.now


def test_errors_of_files_name_the_file(tmp_path):
    answers = launch(errors, 2, tmp_path)
    expected = {"saved in a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder for a manifest": (None, "IsADirectoryError", f"{tmp_path}/no manifest/manifest.json"),
                "weights in place of a folder": (0, "IsADirectoryError", f"{tmp_path}/folder"),
                "weights below a file": (0, "FileExistsError", f"{tmp_path}/file"),
                "a folder that goes": (None, "FileNotFoundError", f"{tmp_path}/saved/step-00000001-")}
    for name, (raises, kind, path) in expected.items():
        for rank, (said, now) in enumerate(answers):
            own = raises in (rank, None)
            assert said[name][0] == (kind if own else "RankError"), said[name]
            assert kind in "".join(said[name][:2]) and path in said[name][1], said[name]
            assert name == "a folder that goes" or said[name][2] == []
            assert now == []
    assert not list(tmp_path.glob("**/*.tmp"))


def test_ranks_that_do_not_see_the_same_files(tmp_path):
    with pytest.raises(RankError, match="step-00000001.*, which rank 0 has made, is not there: save to a file sys"):
        launch(lambda comm: Holder(comm).train(1).save(tmp_path / f"{comm.rank}"), 2)


# --- replicas --------------------------------------------------------------------------------------------------------


def other(comm, folder, what):
    """Save a state of which a replica on the last rank differs, after one that is right; what is said of it."""
    holder = Holder(comm, BY_COLUMNS, tp=2).train(1)
    holder.save(folder)
    name = "table" if what == "buffer" else "norm.weight"
    shard = next(shard for shard in holder.shards if shard.spec.name == name)
    kept = holder.optimizer.state.get(shard.own)
    if what == "places":
        shard.values.copy_(torch.arange(shard.spec.numel))
    if comm.rank == comm.world_size - 1:
        if what == "state":
            kept["exp_avg"][1] += 1
        elif what == "step":
            kept["step"] += 1
        elif what == "places":
            shard.values.copy_(shard.values.flip(0))  # the same sum
        else:
            shard.values[-1] += 1
    holder.step = 2
    try:
        holder.save(folder)
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("what", "said"), [("value", "parameters"), ("places", "parameters"),
                                            ("state", "optimizer/exp_avg"), ("step", "numbers")])
def test_replicas_that_differ_are_named_and_not_saved(tmp_path, what, said):
    answers = launch(other, 4, tmp_path, what)
    assert set(answers) == {("RuntimeError", f"norm.weight is not the same on ranks [2, 3], its replicas: {said} on "
                             "ranks [3] differ from rank 2's. Broadcast it from one of them; did all of them reduce "
                             "its gradient?")}
    assert alone(seed=7).load(tmp_path).step == 1


def test_of_buffers_the_owner_counts(tmp_path):
    assert launch(other, 4, tmp_path, "buffer") == [None] * 4
    assert alone(seed=7).load(tmp_path).model.table.equal(alone().model.table)


def test_a_save_says_what_is_owned_by_nobody_or_twice(tmp_path):
    def saves(comm, owned):
        spec, model = ShardSpec("x", (4,)), nn.Module()
        model.x = nn.Parameter(torch.zeros(4))
        shard = Shard(spec, model.x.detach(), "parameters", torch.float32, model.x, owned[comm.rank](spec))
        state = TrainingState(comm, [shard], torch.optim.SGD([model.x]), [["x"]], model)
        for work in (lambda: saving.save(state, tmp_path / "saved"), lambda: saving.state_dict(state),
                     lambda: saving.save_weights(state, tmp_path / "weights")):
            with pytest.raises((ValueError, RankError)) as error:
                work()
            yield str(error.value)

    for owned, expected in (
            ([lambda s: s, lambda s: s], "x: elements 0 … 3 are on rank 0 and on rank 1: ranks that hold the"),
            ([lambda s: s.cut(0, 2), lambda s: s.cut(1, 4)], "x: elements 1 … 1 are on rank 0 and on rank 1"),
            ([lambda s: s.cut(0, 2), lambda s: s.cut(3, 4)], "x: elements 2 … 2 are on no rank"),
            ([lambda s: None, lambda s: None], "x is in a param group, and no rank owns a part of it")):
        for answer in launch(lambda comm, owned: list(saves(comm, owned)), 2, owned):
            assert all(expected in said for said in answer), answer
    assert not os.listdir(tmp_path)
