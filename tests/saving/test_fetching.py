"""What a host reads and has not comes from the others: the tensors that are read, in chunks, for the time of a load."""

import contextlib
import os
import re
from unittest import mock

import pytest
from own_disks_kit import COLUMNS, ROWS, files, loaded, refusal, zeroed
from saving_kit import differing

from refimpl.comm import FakeCommunicator, launch
from refimpl.saving import fetching


def read_chunks(comm, per_host, folder, expected, cuts):
    """Load by each cut: [(what differs, the sizes of what this rank read to send it)]."""
    found, read = [], fetching._read
    for cut in cuts:
        sizes, before = [], files(folder)
        comm.barrier()
        with mock.patch.object(fetching, "_read", lambda path, at, data, sizes=sizes: (
                sizes.append(len(data)), read(path, at, data))):
            found.append((differing(loaded(comm, per_host, folder, **cut), expected), sizes))
        comm.barrier()
        assert files(folder) == before and not list(folder.glob("*/*/fetched-*"))
    return found


@pytest.mark.parametrize(("world_size", "per_host", "cuts"), [
    (4, 2, [ROWS, COLUMNS, {}]), (2, 1, [{}, COLUMNS]), (3, 1, [{}]), (4, 1, [COLUMNS]), (3, 2, [{}])])
def test_any_hosts_load_what_hosts_saved_apart(two, expected, world_size, per_host, cuts):
    for host, ranks in (("hosta", (0, 1)), ("hostb", (2, 3))):
        path, = (two / host / "saved").iterdir()
        assert sorted(os.listdir(path)) == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in ranks)]
    answers = launch(read_chunks, world_size, per_host, two, expected, cuts)
    assert [[wrong for wrong, _ in each] for each in answers] == [[[]] * len(cuts)] * world_size
    assert not list(two.glob("host[cd]/saved"))  # a new host's folder is gone


def test_what_a_host_has_is_not_sent_to_it(two, expected):
    """By the cut that saved them hosts need what rank 0 alone has written, buffers say, and no generator's state."""
    sent = [sum(sizes) for (_, sizes), in launch(read_chunks, 4, 2, two, expected, [ROWS])]
    assert 0 < sent[0] < 5056 and sent[1:] == [0, 0, 0], sent


@pytest.mark.parametrize("chunk", [100, 2**40])
def test_a_file_goes_in_chunks(two, expected, chunk):
    """With the mutant, a chunk for a whole file, each range is read at once."""
    def fn(comm):
        with mock.patch.object(fetching, "CHUNK", chunk):
            return read_chunks(comm, 2, two, expected, [COLUMNS])
    answers = launch(fn, 4)
    assert [wrong for (wrong, _), in answers] == [[]] * 4
    assert (max(max(sizes) for (_, sizes), in answers) <= 100) == (chunk == 100)


@pytest.mark.parametrize("cut", [ROWS, COLUMNS])
def test_a_damaged_file_is_named_with_its_host_by_whoever_reads_or_sends_it(two, cut):
    path, = two.glob("hostb/saved/step-*/rank-00003*")
    zeroed(path)
    assert re.search(r"^on hostb: DISK/step-\S+/rank-00003.safetensors is damaged: its SHA-256 is", refusal(two, **cut))
    assert not list(two.glob("*/*/fetched-*"))


def test_a_host_whose_disk_is_full_in_a_load_leaves_nothing(two):
    """The others go on sending to it, and all raise."""
    def fn(comm):
        def full(path, at, data):
            raise OSError(28, "No space left on device", str(path))
        with mock.patch.object(fetching, "_write", full) if comm.rank == 1 else contextlib.nullcontext():
            return loaded(comm, 2, two, **COLUMNS)
    answers = launch(fn, 4)
    assert answers[1][0] == "OSError" and "DISK/fetched-" in answers[1][1]
    assert all(name == "RankError" and "rank 1 raised OSError" in said for name, said, _ in answers[::2])
    assert all(same for _, _, same in answers) and not list(two.glob("*/*/fetched-*"))


def test_a_host_sees_what_it_lacks_beside_its_own_files_and_only_while_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_move", lambda comm, folder, view, manifest, moves, ranges: [
        (view / file).touch() for file, _, _ in moves])
    folder, moves = tmp_path / "saved" / "step-1", [("rank-00000.safetensors", 0, 1)]
    folder.mkdir(parents=True)
    (folder / "rank-00001.safetensors").touch()
    with fetching.fetched(FakeCommunicator(1, 2), ["hosta", "hostb"], folder, None, moves, lambda files: {}) as view:
        assert sorted(os.listdir(view)) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert os.listdir(folder.parent) == ["step-1"]
