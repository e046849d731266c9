"""Every host verifies what it reads, and no more."""

import re
from unittest import mock

import pytest
from own_disks_kit import COLUMNS, ROWS, copied, loaded, refusal, zeroed
from saving_kit import Holder, alone, differing, few

from refimpl.comm import FakeCommunicator, launch
from refimpl.saving import manifest
from refimpl.saving import ranks_by_host as hosts
from refimpl.saving.load_checks import files_read


def copies(folder):
    """What four ranks have saved on a folder that they share, and a copy of it on a second host."""
    launch(lambda comm: Holder(comm, **ROWS).train(2).save(folder / "hosta" / "saved"), 4)
    copied(folder / "hosta", folder / "hostb")


def verified(comm, per_host, folder, **cut):
    """The numbers of the files that this rank verifies in a load."""
    seen, verify = [], manifest.verify
    with mock.patch.object(manifest, "verify", lambda path, about: (seen.append(path.name), verify(path, about))):
        loaded(comm, per_host, folder, **cut)
    return [int(each.partition(".")[0][-1]) for each in seen]


def test_each_host_verifies_what_it_reads_and_no_more(tmp_path):
    copies(tmp_path)
    once = [[0], [1], [2], [3]]
    assert launch(lambda comm: verified(comm, 4, tmp_path, **COLUMNS), 4) == once  # one host
    assert launch(lambda comm: verified(comm, 2, tmp_path, **ROWS), 4) == [[0], [1], [0, 3], [2]]  # 0 has buffers
    assert launch(lambda comm: verified(comm, 2, tmp_path, **COLUMNS), 4) == [[0, 2], [1, 3]] * 2


def test_a_rank_reads_its_own_file_where_as_many_ranks_saved(tmp_path):
    """It has the rank's random numbers, even if nothing else in it is for this rank."""
    alone(build=few).save(tmp_path / "saved")
    found, state = manifest.read(tmp_path / "saved"), Holder(FakeCommunicator(1, 2), build=few).state
    first, second = "rank-00000.safetensors", "rank-00001.safetensors"
    assert files_read(state, found, ["hosta", "hostb"])[1] == [first]
    found |= {"world_size": 2, "files": found["files"] | {second: {"pieces": {}}}}
    assert files_read(state, found, ["hosta", "hostb"])[1] == [first, second]


@pytest.mark.parametrize("cut", [ROWS, COLUMNS])
def test_a_copy_that_is_bad_on_one_host_is_found(tmp_path, cut):
    copies(tmp_path)
    path, = tmp_path.glob("hostb/saved/step-*/rank-00003*")
    zeroed(path)
    assert re.search(r"^on hostb: DISK/step-\S+/rank-00003.safetensors is damaged: its", refusal(tmp_path, **cut))


def test_a_load_that_verifies_each_file_once_takes_a_bad_copy(tmp_path, expected):
    """The mutant: a file is some rank's to verify, wherever that is."""
    copies(tmp_path)
    path, = tmp_path.glob("hostb/saved/step-*/rank-00001*")
    zeroed(path)

    def fn(comm):
        with mock.patch.object(hosts, "share", lambda files, reads, hosts, rank: sorted(files)[rank :: len(hosts)]):
            return loaded(comm, 2, tmp_path, **COLUMNS)
    found = launch(fn, 4)[0]
    assert isinstance(found, dict) and differing(found, expected)
