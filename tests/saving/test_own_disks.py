"""Each host keeps the files of its ranks on its own disk. What is missing, mixed, or left of a save that was killed."""

import contextlib
import itertools
import os
import re
import shutil
from unittest import mock

import pytest
from own_disks_kit import COLUMNS, ROWS, copied, files, loaded, on_hosts, refusal, saved, threads_on_hosts
from refused_kit import full_disk
from saving_kit import Holder, alone, differing

from refimpl.comm import RankError, launch, simulate
from refimpl.saving import SavedStateError, manifest, own_disks, sharded


def test_a_later_save_leaves_one_state_and_another_kind_of_save_too(tmp_path):
    def fn(comm):
        found = []
        for shared in (True, False, False, True):
            with on_hosts(comm, 1, tmp_path) as disk:
                disk = tmp_path / "hosta" / "saved" if shared else disk
                holder = Holder(comm).train(len(found) + 1)
                holder.save(disk, shared=shared)
                comm.barrier()
                found.append((sorted(re.sub("-[0-9a-f]{8}/", "/", each) for each in files(tmp_path)),
                              Holder(comm, seed=7).load(disk).step))
                comm.barrier()
        return found
    found, _ = launch(fn, 2)
    assert [step for _, step in found] == [1, 2, 3, 4]
    a, b, name = "hosta/saved/", "hostb/saved/", "step-0000000{}/{}"
    one, two = "rank-00000.safetensors", "rank-00001.safetensors"
    assert found[0][0] == [f"{a}manifest.json", *(a + name.format(1, each) for each in (one, two))]
    for number in (1, 2):
        assert found[number][0] == [a + name.format(number + 1, "manifest.json"), a + name.format(number + 1, one),
                                    b + name.format(number + 1, "manifest.json"), b + name.format(number + 1, two)]
    assert found[3][0][:3] == [f"{a}manifest.json", *(a + name.format(4, each) for each in (one, two))]


def test_of_a_save_on_shared_disks_nothing_is_left_beside_one_on_own_disks(tmp_path):
    for step, shared in ((1, True), (2, False)):
        alone().train(step).save(tmp_path, shared=shared)
    assert [path.name for path in tmp_path.iterdir()] == [path.parent.name for path in tmp_path.glob("*/manifest.json")]
    assert alone(seed=7).load(tmp_path, shared=False).step == 2


def test_what_one_host_has_another_can_get(tmp_path, expected):
    """From one machine to two: a copy on the second is not needed, and is not made by itself."""
    launch(lambda comm: saved(comm, 2, tmp_path, shared=True) and None, 2)
    refused = launch(loaded, 2, 1, tmp_path)
    assert refused[0] == refused[1] and refused[0][0] == "SavedStateError" and refused[0][2]
    assert re.search(r"manifest.json is missing on rank 1 \(hostb\), and there on the others: mount one folder on all "
                     r"hosts, or load\(…, shared=False\), which copies what a host lacks", refused[0][1])
    assert differing(launch(loaded, 2, 1, tmp_path, False)[0], expected) == []


# --- what is missing, mixed or damaged -------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_the_host_that_had_it(two):
    path, = two.glob("hostb/saved/step-*/rank-00003*")
    path.unlink()
    assert re.search(r"hosta, hostb: of step 2 \(step-\S+ \w{8}\) rank-00003.safetensors is missing, saved on hostb$",
                     refusal(two))
    shutil.rmtree(two / "hostb")
    gone = r"rank-00002.safetensors, rank-00003.safetensors are missing, saved on hostb$"
    assert re.search(gone, refusal(two)) and re.search(gone, refusal(two, 2, 2))
    path, = two.glob("hosta/saved/step-*/manifest.json")
    path.write_text("{")
    assert re.search(r"on hosta, hostb: on hosta: \S+/manifest.json is damaged: it is not a manifest", refusal(two))


def saved_as_step_2(comm, folder, steps):
    with on_hosts(comm, 2, folder) as disk:
        holder = Holder(comm, **ROWS).train(steps)
        holder.step = 2
        holder.save(disk, shared=False)


def mixed(folder, renamed):
    """Two saves of the same step: of the first what hosta has, of the second hostb's, under the first one's name."""
    for name, steps in (("one", 1), ("two", 2)):
        launch(saved_as_step_2, 4, folder / name, steps)
    copied(folder / "one" / "hosta", folder / "hosta")
    copied(folder / "two" / "hostb", folder / "hostb")
    if renamed:
        (here,), (there,) = ((folder / host / "saved").iterdir() for host in ("hosta", "hostb"))
        there.rename(there.parent / here.name)


@contextlib.contextmanager
def hashes_that_say_nothing():
    with mock.patch.object(manifest, "verify", lambda path, about: None):
        yield


@pytest.mark.parametrize("renamed", [False, True])
def test_parts_of_two_saves_are_not_mixed(tmp_path, renamed):
    """Nor would they be if no file were verified: the manifests' digest tells them apart."""
    mixed(tmp_path, renamed)
    said = refusal(tmp_path, **COLUMNS)
    assert "rank-00002.safetensors, rank-00003.safetensors are missing, saved on hostb" in said
    assert renamed or "rank-00000.safetensors, rank-00001.safetensors are missing, saved on hosta" in said
    with hashes_that_say_nothing():
        assert loaded_by_threads(tmp_path) is None


def loaded_by_threads(folder):
    """The state_dict of what two hosts, each with a rank, load; None if it is refused."""
    def fn(comm):
        holder = Holder(comm, seed=7)
        try:
            return holder.load(folder / f"host{'ab'[comm.rank]}" / "saved").state_dict()
        except SavedStateError:
            return None
    with threads_on_hosts(1):
        return simulate(fn, 2)[0]


def test_a_load_that_knows_saves_by_their_step_mixes_them(tmp_path, monkeypatch):
    """The mutant. Then the files' hashes alone tell."""
    mixed(tmp_path, True)
    offers = own_disks._offers

    def by_step(directory, host):
        found, wrong = offers(directory, host)
        folder, = directory.glob("step-*")
        return [((step, folder.name, ""), {file: (folder / file).is_file() for file in files}, on)
                for (step, _, _), files, on in found], wrong

    monkeypatch.setattr(own_disks, "_offers", by_step)
    assert loaded_by_threads(tmp_path) is None
    with hashes_that_say_nothing():
        found = loaded_by_threads(tmp_path)
    assert all(differing(found, alone().train(steps).state_dict()) for steps in (1, 2))


def test_hosts_that_see_one_folder_are_told(tmp_path):
    def fn(comm):
        said = "saved is one folder on several hosts: save there without shared=False"
        with on_hosts(comm, 1, tmp_path), pytest.raises(RuntimeError, match=said):
            Holder(comm).save(tmp_path / "saved", shared=False)
    launch(fn, 2)
    assert not list(tmp_path.rglob("rank-*"))


# --- a save that does not end ----------------------------------------------------------------------------------------


def save_by_threads(folder, steps):
    def fn(comm):
        Holder(comm).train(steps).save(folder / f"host{'ab'[comm.rank]}" / "saved", shared=False)
    with threads_on_hosts(1):
        simulate(fn, 2)


def ends(folder, monkeypatch):
    """The step that a load finds if all hosts are killed at each moment of a save of step 2 over one of step 1; None:
    nothing whole."""
    disks, moments, copying = folder / "disks", [], []
    save_by_threads(disks, 1)

    def before(real):
        def call(*args, **how):
            if not copying:
                copying.append(True)
                copied(disks, folder / f"{len(moments)}")
                copying.clear()
                moments.append(real.__name__)
            return real(*args, **how)
        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, before(getattr(os, name)))
        save_by_threads(disks, 2)
    assert set(moments) == {"mkdir", "fsync", "replace", "unlink", "rmdir"}
    copied(disks, folder / f"{len(moments)}")
    found = [loaded_by_threads(folder / f"{number}") for number in range(len(moments) + 1)]
    return [sd and sd["step"] for sd in found]


def test_killed_at_any_moment_the_old_or_the_new_state_is_whole_on_all_hosts_together(tmp_path, monkeypatch):
    found = ends(tmp_path, monkeypatch)
    assert len(found) > 20 and found == sorted(found) and set(found) == {1, 2}
    for number in range(0, len(found), 3):  # the next save works, and leaves nothing else there
        save_by_threads(tmp_path / f"{number}", 3)
        assert loaded_by_threads(tmp_path / f"{number}")["step"] == 3
        assert len(list((tmp_path / f"{number}").glob("host?/saved/*"))) == 2


def each_by_itself(patch):
    """A host removes its old state when it has the new one, whatever the others have."""
    real = sharded._commit
    def commit(directory, name, *args):
        real(directory, name, *args)
        manifest.remove_others(directory, name)
    patch.setattr(sharded, "_commit", commit)


def before_the_new_one(patch):
    real = manifest.remove_others
    patch.setattr(manifest, "remove_others", lambda directory, *keep: real(directory, keep[-1]))


def by_one_manifest(patch):
    """A load takes what one host has committed, whoever else has."""
    real = own_disks._offers
    def offers(directory, host):
        found, wrong = real(directory, host)
        return [(key, dict.fromkeys(files, True), on) for key, files, on in found], wrong
    patch.setattr(own_disks, "_offers", offers)


@pytest.mark.parametrize("mutant", [each_by_itself, before_the_new_one, by_one_manifest])
def test_saves_in_another_order_lose_the_state(tmp_path, monkeypatch, mutant):
    mutant(monkeypatch)
    try:
        assert None in ends(tmp_path, monkeypatch)
    except OSError as error:  # a file that is not where it is said to be
        assert mutant is by_one_manifest and "rank-0000" in str(error)


def on_a_full_disk(comm, folder, rank):
    """At each of one rank's writes its disk is full; then it is not. What is said, and what is there then."""
    said = []
    with on_hosts(comm, 2, folder) as disk:
        holder = Holder(comm, **ROWS).train(1)
        holder.save(disk, shared=False)
        holder.train(1)
        for nth in itertools.count(1):
            try:
                with full_disk(nth) if comm.rank == rank else contextlib.nullcontext():
                    holder.save(disk, shared=False)
            except (OSError, RankError) as error:
                said.append((str(error), Holder(comm, seed=7).load(disk).step))
            else:
                return said, Holder(comm, seed=7).load(disk).step


@pytest.mark.parametrize(("rank", "names"), [(2, ["saved", "rank-00002", "step", "manifest.json", "step"]),
                                             (3, ["rank-00003", "step"])])
def test_an_error_on_one_host_is_one_on_all_and_leaves_what_was(tmp_path, rank, names):
    """But after the last name of all, when the new state is there."""
    answers = launch(on_a_full_disk, 4, tmp_path, rank)
    for me, (said, last) in enumerate(answers):
        assert last == 2 and [step for _, step in said] == [1] * (len(names) - 1) + [2 if rank == 2 else 1]
        for (text, _), name in zip(said, names, strict=True):
            assert name in text and "No space left" in text and "/hostb/" in text
            assert me == rank or text.startswith(f"rank {rank} raised OSError")
    assert len(list(tmp_path.glob("host?/saved/*"))) == 2


