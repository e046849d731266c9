"""Snapshots from elsewhere: each field with each kind of bad value, and files that ask for more than they have."""

import copy
import gzip
import os
import pickle
import struct

import pytest
from allocator_kit import random_trace
from bad_files import BAD, CONTROL, TEXTS, command, pickled, refused, ten_of, with_hole

from refimpl import cli
from refimpl.allocator import DamagedTrace, Snapshot, record, snapshot, unpickled
from refimpl.untrusted.text import one_line

FRAME = {"filename": "train.py", "line": 3, "name": "forward"}
SEGMENT, BLOCK = ("segments", 0), ("segments", 0, "blocks", 0)
EVENT, OOM = ("device_traces", 0, 0), ("device_traces", 0, -1)
SETTINGS = ("allocator_settings",)
FIELDS = {  # place: what may be there instead, and is read
    ("segments",): (), ("device_traces",): (), ("device_traces", 0): ("missing",), SETTINGS: ("missing",),
    (*SETTINGS, "PYTORCH_CUDA_ALLOC_CONF"): ("missing", "control"),
    (*SETTINGS, "max_split_size"): ("missing", "negative", "2^63"),
    (*SETTINGS, "garbage_collection_threshold"): ("missing",), (*SETTINGS, "expandable_segments"): ("missing",),
    (*SETTINGS, "roundup_power2_divisions"): ("missing",),
    (*SEGMENT, "device"): ("missing",), (*SEGMENT, "address"): (), (*SEGMENT, "total_size"): (),
    (*SEGMENT, "stream"): ("negative",), (*SEGMENT, "segment_type"): ("markup", "control"), (*SEGMENT, "blocks"): (),
    (*SEGMENT, "segment_pool_id"): ("missing",), (*SEGMENT, "is_expandable"): ("missing",),
    (*BLOCK, "size"): (), (*BLOCK, "requested_size"): (), (*BLOCK, "state"): (), (*BLOCK, "frames"): ("missing",),
    (*EVENT, "action"): (), (*EVENT, "addr"): (), (*EVENT, "size"): (), (*EVENT, "stream"): ("negative",),
    (*EVENT, "time_us"): ("missing",), (*EVENT, "pool_id"): ("missing",), (*EVENT, "user_metadata"): TEXTS,
    (*EVENT, "frames"): ("missing",), (*EVENT, "frames", 0): ("missing",), (*OOM, "device_free"): (),
    (*OOM, "size"): (), (*EVENT, "frames", 0, "filename"): ("markup", "control"),
    (*EVENT, "frames", 0, "line"): ("negative",), (*EVENT, "frames", 0, "name"): ("markup", "control")}


@pytest.fixture(scope="module")
def whole():
    made = record(random_trace(30, largest=20), settings="max_split_size_mb:64")
    found = {"segments": made.segments, "device_traces": [made.entries], "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": made.settings, "max_split_size": 64 * 2**20, "garbage_collection_threshold": 0.0,
        "expandable_segments": False, "roundup_power2_divisions": {}}}
    found = copy.deepcopy(found)
    found["device_traces"][0].append({"action": "oom", "device_free": 512, "size": 2**20, "stream": 0, "time_us": 9})
    for block in found["segments"][0]["blocks"]:
        block["frames"] = [dict(FRAME)]
    found["segments"][0].setdefault("segment_pool_id", [0, 0])
    found["device_traces"][0][0] |= {"frames": [dict(FRAME)], "pool_id": [0, 0], "user_metadata": "batch 1"}
    return found


@pytest.mark.alone
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", FIELDS, ids=lambda place: ".".join(map(str, place)))
def test_a_bad_field_is_refused_in_one_line(whole, tmp_path, place, bad):
    found, path = copy.deepcopy(whole), tmp_path / "s.pickle"
    with_hole(found, place, bad)
    path.write_bytes(pickled(found, bad, another="x" if place[-1] in ("segments", "blocks", 0) else [1.5]))
    words = refused(lambda: command("replay", path), tmp_path)
    path.unlink()
    assert (words is None) == (bad in FIELDS[place]), words


def test_ten_of_these(whole, tmp_path):
    for place, bad in ten_of(FIELDS, BAD):
        test_a_bad_field_is_refused_in_one_line(whole, tmp_path, place, bad)


def test_names_move_no_cursor(whole, tmp_path, capsys):
    found, path = copy.deepcopy(whole), tmp_path / "s.pickle"
    for entry in found["device_traces"][0]:
        entry["frames"] = [{"filename": f"{CONTROL}.py", "line": 3, "name": CONTROL}]
    path.write_bytes(pickle.dumps(found))
    assert command("replay", path) is None  # and what it says has no control character
    cli.main(["replay", str(path)])
    assert f"{one_line(CONTROL)}.py:3 {one_line(CONTROL)}\n" in capsys.readouterr().out


def test_divisions_are_numbers_by_name(whole, tmp_path):
    path = tmp_path / "s.pickle"
    def loaded(divisions):
        path.write_bytes(pickle.dumps(whole | {"allocator_settings": {"roundup_power2_divisions": divisions}}))
        return Snapshot.load(path).resolved
    assert loaded({"1": 8, "2": 0}) == {"roundup_power2_divisions": {"1": 8, "2": 0}}
    for bad in ({1: 8}, {"1": -1}, {"1": 2**31}, {"1": "8"}):
        with pytest.raises(DamagedTrace, match="roundup_power2_divisions is .*: expected dict of ints, 0 or more"):
            loaded(bad)


def refusal(path):
    """The one line that refuses a file, in Python as in the command."""
    words = refused(lambda: command("replay", path), path.parent)
    with pytest.raises(DamagedTrace) as error:
        Snapshot.load(path)
    assert words and len(str(error.value)) < 2000
    return words


def doubled(value, kind, times=40):
    """(x, x) of x, so many times: few bytes of a pickle, and 2^40 values to who writes or hashes them."""
    return doubled(kind([value, value]), kind, times - 1) if times else value


@pytest.mark.parametrize(("kind", "words"), [(tuple, "is not a whole file"), (list, "is [[[...], [...]], ")])
def test_what_is_shared_is_not_written_out(whole, tmp_path, kind, words):
    path = tmp_path / "s.pickle"
    for change in ({"segments": {"x": doubled(None, kind)}}, {"allocator_settings": doubled(None, kind)},
                   {"device_traces": [[{"action": doubled(None, kind)}]]}):
        path.write_bytes(pickle.dumps(whole | change))
        assert words in refusal(path) or "segments is {'x': [[...], [...]]}" in refusal(path)


def test_a_key_of_shared_tuples_is_not_hashed(tmp_path):
    path = tmp_path / "s.pickle"
    for pairs in (b"2\x86" * 40, b"".join(b"\x94h%c\x86" % i for i in range(40))):
        path.write_bytes(b"\x80\x04}N" + pairs + b"Ns.")
        assert "is not a whole file" in refusal(path)


@pytest.mark.parametrize("data", [
    b"\x80\x02]r\xff\xff\xff\x7f.", b"\x80\x02]r\xff\xff\xff\xff.", b"\x80\x04X\xff\xff\xff\xff.",
    b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".", b"\x80\x04\x95" + struct.pack("<Q", 2**34) + b"N.",
    b"\x80\x04\x96" + struct.pack("<Q", 2**33) + b".", b"\x80\x04\x8b\xff\xff\xff\x7f.", b"\x80\x02p4294967295\n.",
    b"\x80\x02I" + b"9" * 10**6 + b"\n.", b"", b"\x80", b".", b"(" * 10**6 + b".", b"]" * 10**7 + b"."])
def test_a_few_bytes_ask_for_no_more(tmp_path, data):
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    assert "is not a whole file of torch.cuda.memory._dump_snapshot" in refusal(path)


@pytest.mark.parametrize("inside", [b"\0", b"]", b"K\0"])
def test_a_packed_file_that_holds_gigabytes(tmp_path, inside):
    path = tmp_path / "s.pickle.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(9):
            file.write(inside * (2**23 // len(inside)))
    assert "it holds more than 67,108,864 bytes when it is unpacked" in refusal(path)


def test_a_pipe_a_folder_and_a_file_that_is_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device: expected a file" in refusal(tmp_path / "pipe")
    assert "Is a directory" in refused(lambda: command("replay", tmp_path), tmp_path)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(snapshot.LIMIT + 1)
    assert "has 1,073,741,825 bytes: expected at most 1,073,741,824" in refusal(tmp_path / "large")


def test_a_recording_that_contradicts_itself(whole, tmp_path):
    path, first = tmp_path / "s.pickle", whole["segments"][0]
    freed = {"action": "free_completed", "addr": 512, "size": 1, "stream": 0}
    for change, words in (
            ({"segments": [*whole["segments"], first | {"address": first["address"] + 512}]}, "two segments have the"),
            ({"device_traces": [[freed, *whole["device_traces"][0]]]}, "no segment is there")):
        path.write_bytes(pickle.dumps(whole | change))
        assert words in refused(lambda: command("replay", path), tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_that_a_snapshot_has_is_read_as_python_reads_it(whole, protocol):
    whole = whole | {"numbers": [0, -1, 255, 256, 2**31, -2**31, 2**63, -2**63, 0.5, True, None, (), (1, -2**40)],
                     "text": ["é\ud800", "x" * 300], "frames": [{"name": f"f{i}"} for i in range(30_000)]}
    assert unpickled.load(pickle.dumps(whole, protocol)) == whole
