"""A rank that is killed in the middle of a save, at each of its moments; and what is cleaned up after it."""

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from saving_kit import Holder, alone, differing

from refimpl.comm import RankError, launch
from refimpl.saving import SavedStateError, manifest

KILLED = {  # (rank, function, how often it has been called before): what is there afterwards
    "rank 1, before its file": (1, "open", 0, 1), "rank 1, before its file is synced": (1, "fsync", 0, 1),
    "rank 1, between its file and the end": (1, "fsync", 1, 1),
    "rank 0, before its folder": (0, "mkdir", 0, 1), "rank 0, before its file": (0, "open", 0, 1),
    "rank 0, between its file and its name": (0, "fsync", 2, 1), "rank 0, before the manifest": (0, "open", 1, 1),
    "rank 0, before the manifest is synced": (0, "fsync", 3, 1),
    "rank 0, before the manifest's name": (0, "replace", 0, 1), "rank 0, after it": (0, "fsync", 4, 2),
    "rank 0, before the old one goes": (0, "rmtree", 0, 2), "rank 0, while it goes": (0, "unlink", 1, 2)}


def kill_in(function, before):
    """Instead of calling `function` once more, after so many calls, die."""
    where = {"open": builtins, "rmtree": shutil, "mkdir": os, "fsync": os, "replace": os, "unlink": os}[function]
    real, calls = getattr(where, function), []
    def dies(*args, **kwargs):
        written = function != "open" or "w" in "".join(str(mode) for mode in args[1:2])
        if written and len(calls) == before:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.extend([None] * written)
        return real(*args, **kwargs)
    setattr(where, function, dies)


def dying(comm, folder, rank, function, before):
    """A save of step 2 over one of step 1."""
    holder = Holder(comm).train(2)
    if comm.rank == rank:
        kill_in(function, before)
    holder.save(folder)


def found_in(folder):
    return alone(seed=7).load(folder).state_dict()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Saved states of steps 1 and 2, and what is in them."""
    folders = {steps: tmp_path_factory.mktemp(f"step-{steps}") for steps in (1, 2)}
    def save(comm):
        for steps, folder in folders.items():
            Holder(comm).train(steps).save(folder)
    launch(save, 2)
    return {steps: (folder, found_in(folder)) for steps, folder in folders.items()}


@pytest.mark.parametrize("moment", KILLED)
def test_killed_at_any_moment_the_old_or_the_new_one_is_whole(two, tmp_path, moment):
    rank, function, before, expected = KILLED[moment]
    folder = tmp_path / "saved"
    shutil.copytree(two[1][0], folder)
    with pytest.raises(RankError, match=f"rank {rank} was killed by SIGKILL"):
        launch(dying, 2, folder, rank, function, before)
    found = found_in(folder)
    assert found["step"] == expected and differing(found, two[expected][1]) == []
    alone().train(3).save(folder)  # and the next save works, and leaves nothing else there
    assert found_in(folder)["step"] == 3
    assert sorted(os.listdir(folder)) == ["manifest.json", json.loads((folder / "manifest.json").read_text())["folder"]]


POINTS = """
import os, sys
import torch
from saving_kit import alone

torch.set_num_threads(1)
folder, other, points = sys.argv[1], sys.argv[2], int(sys.argv[3])
holder = alone().train(2)
calls = [0]

def counting(stop):
    def each(frame, event, what):  # every call, return, and call of C, in our code and in libraries'
        calls[0] += 1
        if calls[0] == stop:
            os.kill(os.getpid(), 9)
    return each

def saved(where, stop):
    if not (child := os.fork()):
        sys.setprofile(counting(stop))
        holder.save(where)
        sys.setprofile(None)
        os.write(write, calls[0].to_bytes(8, "little"))
        os._exit(0)
    return os.waitpid(child, 0)[1]

alone().train(1).save(other)  # what is imported at the first time is there
read, write = os.pipe()
saved(other, 0)
total = int.from_bytes(os.read(read, 8), "little")
for point in range(points):
    last = point == points - 1  # then the save has returned, or is about to: calls differ by a few
    assert saved(folder, 1 + (total - 1) * point // (points - 1)) in (9, 0 if last else 9), point
    print(alone(seed=7).load(folder).step)
    alone().train(1).save(folder)
print(total)
"""


@pytest.mark.parametrize("points", [12, 100])
def test_killed_at_points_of_a_save_that_are_as_far_apart(two, tmp_path, points):
    for name in ("saved", "other"):
        shutil.copytree(two[1][0], tmp_path / name)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", POINTS, tmp_path / "saved", tmp_path / "other",
                           str(points)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH":
                           os.pathsep.join(sys.path)}, timeout=300)
    assert done.returncode == 0, done.stderr
    *steps, total = map(int, done.stdout.split())
    assert len(steps) == points and total > 1000
    assert set(steps) == {1, 2} and steps == sorted(steps)  # the old one, from some point on the new one


def test_room_is_made_before_it_is_needed(tmp_path):
    alone().train(1).save(tmp_path)
    current, = tmp_path.glob("step-*")
    stale, theirs = tmp_path / "step-00000009-0123abcd", tmp_path / "step-9"
    for folder in (stale, theirs):
        folder.mkdir()
    begun = manifest.begin(tmp_path, 2)
    assert {path.name for path in tmp_path.glob("step-*")} == {current.name, begun, theirs.name}


def test_nothing_is_removed_for_a_manifest_that_cannot_be_read(tmp_path):
    alone().train(1).save(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    current, = tmp_path.glob("step-*")
    begun = manifest.begin(tmp_path, 2)
    assert {path.name for path in tmp_path.glob("step-*")} == {current.name, begun}


def test_a_link_to_a_manifest_is_none_and_one_to_its_folder_is(tmp_path):
    alone().train(1).save(tmp_path / "saved")
    (tmp_path / "folder").symlink_to(tmp_path / "saved")
    assert found_in(tmp_path / "folder")["step"] == 1
    path = tmp_path / "saved" / "manifest.json"
    for elsewhere in (tmp_path / "other.json", tmp_path / "saved" / "other.json"):
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        holder = alone(seed=7)
        before = holder.state_dict()
        with pytest.raises(SavedStateError, match=r"manifest.json is a link to .*other.json: copy the whole"):
            holder.load(tmp_path / "saved")
        assert differing(holder.state_dict(), before) == []
        path.unlink()
        elsewhere.rename(path)
    alone().train(2).save(tmp_path / "folder")
    assert found_in(tmp_path / "saved")["step"] == 2


def test_a_manifest_shows_any_change(tmp_path):
    given = {"format": manifest.FORMAT, "step": 3, "lr": 0.1, "nested": {"b": [1, 2], "a": None}, "folder": "step-x"}
    with pytest.raises(SavedStateError, match="step-x has gone: somebody has removed what this save has written"):
        manifest.commit(tmp_path, given)
    (tmp_path / "step-x").mkdir()
    manifest.commit(tmp_path, given)
    assert manifest.read(tmp_path) == given
    text = (tmp_path / "manifest.json").read_text()
    for old, new in (("3", "4"), ("0.1", "0.2"), ("null", "true"), ("1", "3")):
        (tmp_path / "manifest.json").write_text(text.replace(old, new, 1))
        with pytest.raises(SavedStateError, match=r"manifest.json was changed after it was written: its SHA-256 is"):
            manifest.read(tmp_path)
    for junk in (b"", b"[]", b"3", b"\x80\x04K\x01.", text[:-9].encode()):
        (tmp_path / "manifest.json").write_bytes(junk)
        with pytest.raises(SavedStateError, match=r"manifest.json is damaged"):
            manifest.read(tmp_path)
