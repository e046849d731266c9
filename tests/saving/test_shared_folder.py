"""Whether ranks see one folder, and whether a state is there, asked before training, of ranks with folders of their
own."""

import os
import re
from unittest import mock

import pytest
import torch
from own_disks_kit import on_hosts
from rank_pool import on_ranks
from saving_kit import Holder

from refimpl import saving
from refimpl.comm import RankError, launch
from refimpl.saving import shared_folder as shared


def checked(comm, per_host, folder, seconds=0.3):
    """What is said of a folder of each host."""
    with on_hosts(comm, per_host, folder) as disk, pytest.raises(RuntimeError) as error:
        saving.check_shared(comm, disk, seconds)
    return type(error.value).__name__, re.sub(r"/host\w/saved", "/saved", str(error.value))


def test_a_folder_that_is_not_shared_is_told_by_all_ranks_alike(tmp_path):
    first, *others = launch(checked, 4, 2, tmp_path)
    assert others == [first] * 3
    name, said = first
    assert name == "RuntimeError" and re.sub(r"shared-\w{8}", "shared-x", said) == (
        f"{tmp_path}/saved is not shared by all ranks: rank 0 (hosta) has made shared-x there, and within 0.3 s "
        "ranks 2 and 3 (hostb) did not see it. Mount one folder on all hosts, and give that; or let each host keep its "
        "ranks' part on its own disk: save(…, shared=False); or keep the model alone: save_weights(path) needs rank "
        "0's disk alone")
    assert os.listdir(tmp_path) == []


def test_one_that_may_not_be_written_is_told_too(tmp_path):
    def fn(comm):
        with mock.patch.object(os, "access", lambda path, how: comm.rank != 1):
            return checked(comm, 3, tmp_path)
    answers = launch(fn, 3)
    assert answers == answers[:1] * 3 and "s rank 1 may not write there. Mount" in answers[0][1]
    assert os.listdir(tmp_path) == []


@on_ranks(3)
def test_one_that_is_shared_is_left_as_it_was(comm, tmp_path):
    (tmp_path / "mine").touch()
    for folder in (tmp_path, tmp_path / "new" / "newer"):
        saving.check_shared(comm, folder)
        comm.barrier()
        assert os.listdir(tmp_path) == ["mine"]
        comm.barrier()


@pytest.mark.parametrize(("seconds", "fails"), [(5, False), (0, True)])
def test_a_file_system_may_answer_late(tmp_path, seconds, fails):
    """As one that has the names of a folder in its cache. The mutant looks once."""
    def fn(comm):
        looks, real = [], shared._is_listed
        with mock.patch.object(shared, "_is_listed", lambda path: looks.append(path) or len(looks) > 3 and real(path)):
            try:
                saving.check_shared(comm, tmp_path, seconds)
            except RuntimeError:
                return True
    assert launch(fn, 2) == [fails or None] * 2


def test_a_folder_that_rank_0_cannot_make_is_an_error_on_all(tmp_path):
    (tmp_path / "file").touch()
    def fn(comm):
        with pytest.raises((OSError, RankError), match="file") as error:
            saving.check_shared(comm, tmp_path / "file")
        return type(error.value).__name__
    assert launch(fn, 2) == ["FileExistsError", "RankError"]
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("where", ["hosta", "hostb"])
def test_whether_a_state_is_there_is_one_answer(tmp_path, where, apart):
    """Rank 0's; of states that hosts keep apart, anyone's, as rank 0's host may be new."""
    launch(lambda comm: Holder(comm).save(tmp_path / where / "saved", shared=not apart), 1)

    def fn(comm):
        with on_hosts(comm, 1, tmp_path) as disk:
            return [saving.exists(comm, disk), saving.exists(comm, disk, shared=False),
                    saving.exists(comm, tmp_path / "nothing")]
    assert launch(fn, 2) == [[where == "hosta", True, False]] * 2


def test_ranks_that_ask_their_own_disk_part_ways(tmp_path):
    """The mutant: some load, which is a collective, and others train."""
    launch(lambda comm: Holder(comm).save(tmp_path / "hosta" / "saved"), 1)

    def fn(comm, exists):
        with on_hosts(comm, 1, tmp_path) as disk:
            there = exists(comm, disk)
        return len(set(comm.all_gather(torch.tensor([there])).tolist()))
    assert launch(fn, 2, saving.exists) == [1, 1]
    assert launch(fn, 2, lambda comm, disk: (disk / "manifest.json").exists()) == [2, 2]
