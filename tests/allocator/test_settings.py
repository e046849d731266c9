"""Settings are read as PyTorch reads them: by its own parser, in this process."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refimpl.allocator import Snapshot
from refimpl.allocator.settings import LARGE_SEGMENT, MIB, Settings

ASKED = [2**i + j for i in range(10, 40) for j in (-1, 0, 1)]  # bytes
POWERS = st.integers(0, 17).map(lambda i: 2**i)


@pytest.fixture(scope="module")
def torch_divisions():
    """PyTorch's number of divisions for a size, with the settings that it read last."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    function = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_size_t
    yield function
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:1")


@given(pairs=st.lists(st.tuples(POWERS, st.integers(0, 5).map(lambda i: 2**i) | st.just(0)), min_size=1, max_size=5),
       last=st.none() | st.just(0) | st.integers(0, 5).map(lambda i: 2**i), ascending=st.booleans())
def test_divisions_are_those_of_pytorchs_parser(torch_divisions, pairs, last, ascending):
    pairs = sorted(pairs) if ascending else pairs
    items = [f"{size}:{number}" for size, number in pairs] + ([] if last is None else [f">:{last}"])
    text = f"roundup_power2_divisions:[{','.join(items)}]"
    torch._C._accelerator_setAllocatorSettings(text)
    ours = Settings.parse(text).divisions
    assert [ours[min(max(0, size.bit_length() - 21), 15)] for size in ASKED] == list(map(torch_divisions, ASKED))


@pytest.mark.parametrize(("nbytes", "rounded", "segment"), [
    (0, 512, 2 * MIB), (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB - 1, MIB, 2 * MIB),
    (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB - 511, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512, 12 * MIB), (12 * MIB, 12 * MIB, 12 * MIB)])
def test_sizes_at_the_edge_of_each_constant(nbytes, rounded, segment):
    assert Settings().rounded(nbytes) == rounded and Settings().segment(rounded) == segment


@pytest.mark.parametrize(("nbytes", "rounded"), [
    (2 * MIB, 2 * MIB), (2 * MIB + 1, 2 * MIB + 2**18), (3 * MIB - 1, 3 * MIB), (4 * MIB - 1, 4 * MIB),
    (2048, 2048), (2049, 2560), (4096, 4096), (4097, 4608), (6145, 6656), (8193, 9216)])
def test_eight_divisions(nbytes, rounded):
    assert Settings.parse("roundup_power2_divisions:8").rounded(nbytes) == rounded


def test_an_interval_may_have_no_divisions():
    assert Settings.parse("roundup_power2_divisions:[4:0,8:8,>:0]").divisions == (0, 0, 0, 8) + (0,) * 12


def test_the_example_of_pytorchs_notes():
    """1,200 with 4 divisions is 1,280, between 1,024 and 2,048."""
    assert Settings.parse("roundup_power2_divisions:4").rounded(1200 * 2**10) == 1280 * 2**10


def test_what_is_split():
    plain, limited = Settings(), Settings.parse("max_split_size_mb:32")
    assert plain.splits(MIB, 512) and not plain.splits(MIB, 0)
    assert plain.splits(2 * MIB, MIB + 512) and not plain.splits(2 * MIB, MIB)
    assert Settings.parse("expandable_segments:True").splits(2 * MIB, 512)
    assert limited.splits(32 * MIB - 512, 2 * MIB) and not limited.splits(32 * MIB, 2 * MIB)
    assert limited.serves(32 * MIB - 512, MIB) and not limited.serves(32 * MIB, MIB)
    assert limited.serves(52 * MIB - 512, 32 * MIB) and not limited.serves(52 * MIB, 32 * MIB)
    assert plain.serves(10**12, 1)


def test_all_settings_of_one_text():
    text = ("max_split_size_mb:128, garbage_collection_threshold:0.6, roundup_power2_divisions:[64:8,>:1], "
            "expandable_segments:True, max_non_split_rounding_mb:40, large_segment_size_mb:32")
    found = Settings.parse(text)
    assert (found.max_split_size, found.garbage_collection_threshold) == (128 * MIB, 0.6)
    assert (found.expandable_segments, found.max_non_split_rounding) == (True, 40 * MIB)
    assert found.large_segment_size == 32 * MIB and found.divisions == (8,) * 7 + (1,) * 9
    assert Settings.parse("") == Settings()
    assert Settings.parse("pinned_num_register_threads:8,backend:native,graph_capture_record_stream_reuse:True") == \
        Settings(), "what has no effect on addresses"
    assert Settings.parse("per_process_memory_fraction:0.5").memory_fraction == 0.5


def test_the_least_values_that_pytorch_takes():
    found = Settings.parse("max_split_size_mb:20,max_non_split_rounding_mb:20,large_segment_size_mb:11")
    assert (found.max_split_size, found.max_non_split_rounding, found.large_segment_size) == (20 * MIB, 20 * MIB,
                                                                                             11 * MIB)


def test_what_a_snapshot_has_resolved_comes_before_its_text():
    entry = {"action": "alloc", "addr": 0, "size": 1, "stream": 0}
    resolved = {"max_split_size": 64 * MIB, "garbage_collection_threshold": 0.5, "expandable_segments": True,
                "roundup_power2_divisions": {str(2**i): 8 for i in range(16)}, "pinned_use_cuda_host_register": False}
    text = "max_split_size_mb:32,large_segment_size_mb:40"
    found = Settings.of(Snapshot([], [entry | {"pool_id": (0, 0)}], text, resolved=resolved))
    assert (found.max_split_size, found.large_segment_size, found.version) == (64 * MIB, 40 * MIB, "2.14")
    assert found.garbage_collection_threshold == 0.5 and found.expandable_segments and found.divisions == (8,) * 16
    assert Settings.of(Snapshot([], [entry], resolved={"max_split_size": -1})) == Settings(version="2.11")


@pytest.mark.parametrize(("text", "others", "said"), [
    ("max_split_size_mb:19", {}, "refuses it: CachingAllocator option max_split_size_mb too small, must be >= 20"),
    ("", {"max_split_size": LARGE_SEGMENT - 1}, f"expected at least {LARGE_SEGMENT}"),
    ("", {"garbage_collection_threshold": 1.0}, "a share from 0 to below 1"),
    ("max_non_split_rounding_mb:5", {}, "too small, must be >= 20"), ("large_segment_size_mb:10", {}, "be > 10 MB"),
    ("max_split_size_mb:many", {}, "max_split_size_mb:many is not a value"),
    ("backend:cudaMallocAsync", {}, "'backend' is not simulated: expected max_split_size_mb"),
    ("roundup_power2_divisions:3", {}, "to be power of 2"), ("roundup_power2_divisions:0", {}, "not a value"),
    ("roundup_power2_divisions:[3:2]", {}, "not a value"),
    ("garbage_collection_threshold:0", {}, r"set it in \(0.0, 1.0\)"), ("backend:x", {}, "'backend' is not simulated"),
    ("expandable_segments:yes", {}, "expandable_segments:yes: PyTorch refuses it: Expected 'True' or 'False'"),
    ("", {"memory_fraction": 0}, "memory_fraction=0"),
    ("", {"version": "1.13"}, "version='1.13': expected one of 2.11"), ("", {"version": "new"}, "version='new'"),
    ("large_segment_size_mb:32", {"version": "2.11"}, "it is fixed to 20971520 before 2.13")])
def test_what_pytorch_would_not_take(text, others, said):
    with pytest.raises(ValueError, match=said):
        Settings.parse(text, **others)


@pytest.mark.parametrize(("given", "known"), [("2.14.1+cu130", "2.14"), ("2.13.0", "2.13"), (torch.__version__, None)])
def test_torch_s_own_version_names_its_rules(given, known):
    assert Settings(version=given).version == (known or ".".join(torch.__version__.split(".")[:2]))


def test_a_newer_torch_has_the_newest_rules_that_are_known_and_says_so():
    with pytest.warns(UserWarning, match="torch 2.99 is newer than 2.14, the newest whose .*rules of 2.14 are used"):
        assert Settings(version="2.99.0") == Settings(version="2.14")
