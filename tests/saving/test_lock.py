"""Two jobs in one folder, a manifest that is not whole, links and other things in the place of files: nothing is lost.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from refused_kit import full_disk
from saving_kit import alone

from refimpl.saving import SavedStateError, durable, lock, manifest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
JOB = """
import json, sys
from saving_kit import alone
holder, told = alone().train(int(sys.argv[2])), {"saved": 0, "refused": 0, "lost": []}
for _ in range(int(sys.argv[3])):
    try:
        holder.save(sys.argv[1])
    except RuntimeError as error:
        assert str(error).startswith("another job saves here: "), error
        told["refused"] += 1
        continue
    told["saved"] += 1
    try:
        alone(seed=7).load(sys.argv[1])
    except Exception as error:
        if "another job" not in str(error):
            told["lost"].append(str(error))
print(json.dumps(told))
"""


def job(folder, step, times):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", JOB, str(folder), str(step), str(times)],
                            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def found(folder):
    return alone(seed=7).load(folder).step


@pytest.mark.parametrize("times", [20, 200])
def test_of_two_jobs_in_one_folder_each_save_that_returned_was_whole_or_the_other_was_told(tmp_path, times):
    told = [json.loads(each.communicate(timeout=300)[0]) for each in [job(tmp_path, step, times) for step in (1, 2)]]
    assert all(each["saved"] + each["refused"] == times for each in told) and any(each["saved"] for each in told)
    # While one job loads, the other may replace what it reads: the files that it names have gone then.
    lost = [text for each in told for text in each["lost"] if "is missing" not in text and "No such file" not in text]
    assert not lost and found(tmp_path) in (1, 2)
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", manifest.read(tmp_path)["folder"]]


def test_a_save_that_another_has_begun_is_told_who_it_is_and_takes_nothing(tmp_path):
    alone().train(1).save(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with lock.only_save(tmp_path):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"another job saves here: .*saving.lock is held by "
                                                   rf"'{socket.gethostname()}, process {os.getpid()}, since \d+-"):
                alone().train(2).save(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before and found(tmp_path) == 1
    alone().train(2).save(tmp_path)
    assert found(tmp_path) == 2 and not (tmp_path / lock.NAME).exists()


def test_an_error_in_a_save_lets_the_lock_go(tmp_path):
    alone().train(1).save(tmp_path)
    with full_disk(2), pytest.raises(OSError, match="No space left"):
        alone().train(2).save(tmp_path)
    assert not (tmp_path / lock.NAME).exists()
    alone().train(3).save(tmp_path)
    assert found(tmp_path) == 3


HOLDS = """
import os, sys, time
from pathlib import Path
from refimpl.saving import lock
with lock.only_save(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_the_lock_of_a_job_that_was_killed_is_free(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                          env=ENVIRONMENT) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=f"process {process.pid}"):
            alone().train(1).save(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / lock.NAME).exists()
    alone().train(1).save(tmp_path)
    assert found(tmp_path) == 1 and not (tmp_path / lock.NAME).exists()


@pytest.mark.parametrize("lives", [True, False])
def test_another_host_whose_locks_are_not_known_here_is_watched(tmp_path, monkeypatch, lives):
    monkeypatch.setattr(lock, "BEAT", 0.3)
    (tmp_path / lock.NAME).write_text("elsewhere\nprocess 3\nsince 2026-01-01 00:00:00\n")
    if not lives:
        alone().train(1).save(tmp_path)
        assert found(tmp_path) == 1
        return
    beats = subprocess.Popen([sys.executable, "-c", "import os, sys, time\n"
                              "while True:\n os.utime(sys.argv[1])\n time.sleep(0.1)", str(tmp_path / lock.NAME)])
    try:
        with pytest.raises(RuntimeError, match="is held by 'elsewhere, process 3, since 2026-01-01 00:00:00'"):
            alone().train(1).save(tmp_path)
    finally:
        beats.kill()
        beats.wait()


def test_the_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with lock.only_save(tmp_path):
        first = (tmp_path / lock.NAME).stat().st_mtime_ns
        time.sleep(0.5)
        assert (tmp_path / lock.NAME).stat().st_mtime_ns > first


@pytest.mark.parametrize("what", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_file_in_the_place_of_the_lock_is_refused_at_once(tmp_path, what):
    target, place = tmp_path / "target", tmp_path / "saved" / lock.NAME
    place.parent.mkdir()
    target.write_text("mine")
    {"link": lambda: place.symlink_to(target), "dangling link": lambda: place.symlink_to(tmp_path / "none"),
     "fifo": lambda: os.mkfifo(place), "folder": place.mkdir}[what]()
    begin = time.monotonic()
    with pytest.raises(OSError, match="saving.lock"):
        alone().train(1).save(tmp_path / "saved")
    assert time.monotonic() - begin < 5 and target.read_text() == "mine" and not (tmp_path / "none").exists()


# --- a manifest that is not whole ------------------------------------------------------------------------------------

CHANGES = {"one letter of the folder": lambda text: text.replace("step-0", "step-1", 1),
           "another format": lambda text: text.replace('"format": 2', '"format": 1'),
           "a wrong type": lambda text: json.dumps({**json.loads(text), "folder": 7}),
           "a folder that leaves": lambda text: json.dumps({**json.loads(text), "folder": "../.."}),
           "not JSON": lambda text: text[:-9], "empty": lambda text: ""}


@pytest.mark.parametrize("change", [*CHANGES, "missing", "a folder", "a fifo", "a link"])
def test_nothing_goes_before_the_new_state_is_whole(tmp_path, change):
    alone().train(1).save(tmp_path)
    path, (old,) = tmp_path / "manifest.json", tmp_path.glob("step-*")
    files, text = {each: each.read_bytes() for each in old.iterdir()}, path.read_text()
    path.unlink()
    if change in CHANGES:
        path.write_text(CHANGES[change](text))
    elif change != "missing":
        {"a folder": path.mkdir, "a fifo": lambda: os.mkfifo(path), "a link": lambda: path.symlink_to(old)}[change]()
    with full_disk(2), pytest.raises(OSError, match="No space left"), pytest.warns(UserWarning, match="no whole mani"):
        alone().train(2).save(tmp_path)
    assert {each: each.read_bytes() for each in old.iterdir()} == files
    if change == "a folder":
        with pytest.raises(OSError, match="manifest.json"), pytest.warns(UserWarning, match="nothing is removed"):
            alone().train(2).save(tmp_path)
        assert {each: each.read_bytes() for each in old.iterdir()} == files
        return
    with pytest.warns(UserWarning, match=f"has {old.name}, and no whole manifest .*nothing is removed before this"):
        alone().train(2).save(tmp_path)
    assert found(tmp_path) == 2 and not old.exists()


def test_links_in_the_place_of_folders_and_temporary_files_are_left_alone(tmp_path):
    theirs, saved = tmp_path / "theirs", tmp_path / "saved"
    theirs.mkdir()
    (theirs / "file").write_text("mine")
    alone().train(1).save(saved)
    (saved / "step-00000007-0123abcd").symlink_to(theirs)
    (saved / "step-00000008-0123abcd").write_text("a file")
    (saved / "manifest.json.tmp").symlink_to(theirs / "file")
    alone().train(2).save(saved)
    assert (theirs / "file").read_text() == "mine" and found(saved) == 2
    assert (saved / "step-00000007-0123abcd").is_symlink() and (saved / "step-00000008-0123abcd").is_file()


def test_a_temporary_file_is_new_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / f"file.{bytes(4).hex()}.tmp").symlink_to(tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        durable.write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "theirs").read_text() == "mine" and not (tmp_path / "file").exists()


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_manifest_that_is_no_file_is_told_at_once(tmp_path, what):
    alone().train(1).save(tmp_path)
    path = tmp_path / "manifest.json"
    path.unlink()
    os.mkfifo(path) if what == "fifo" else path.mkdir()
    with pytest.raises((SavedStateError, IsADirectoryError), match="manifest.json"):
        alone(seed=7).load(tmp_path)


def test_a_folder_that_somebody_removed_is_not_named(tmp_path, monkeypatch):
    alone().train(1).save(tmp_path)
    real = manifest.commit

    def commit(directory, description):
        shutil.rmtree(directory / description["folder"])
        real(directory, description)

    monkeypatch.setattr(manifest, "commit", commit)
    with pytest.raises(SavedStateError, match="has gone: somebody has removed what this save has written"):
        alone().train(2).save(tmp_path)
    assert found(tmp_path) == 1
