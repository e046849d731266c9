"""DiskStore: bytes come back, host memory does not grow with the model, what is refused, what is left."""

import ctypes
import gc
import os
import threading
import time
from unittest.mock import patch

import psutil
import pytest
import torch
from offload_kit import STAGES, alone, check_one_engine, continued
from rank_pool import on_ranks
from zero_kit import equal, parameters_of, train_gpt

from refimpl import memory
from refimpl.comm import Link
from refimpl.offload import DiskStore
from refimpl.offload.disk.file import aligned
from refimpl.offload.disk_store import buffers_bytes, file_bytes
from refimpl.offload.errors import DamagedBlock, StoreError
from refimpl.zero import Zero1

SMALL = {"buffer_bytes": 4096, "buffer_count": 2}


@pytest.fixture
def store(tmp_path):
    with DiskStore(tmp_path, buffer_bytes=8192, buffer_count=4) as found:
        yield found


def tensors_of(n=5000):
    return [torch.randn(n), torch.randn(7, 3).bfloat16(), torch.zeros(0), torch.tensor([n])]


def held(tensors):
    return [x.untyped_storage().nbytes() for x in tensors]


@pytest.mark.parametrize("options", [SMALL, {"buffer_bytes": 8192, "buffer_count": 4, "thread_count": 3},
                                     {"capacity_bytes": 2**20}], ids=str)
def test_tensors_come_back_to_the_bit(tmp_path, options):
    with DiskStore(tmp_path, **options) as store:
        buckets = {key: tensors_of(3000 + 500 * key) for key in range(9)}
        kept = {key: [x.clone() for x in tensors] for key, tensors in buckets.items()}
        for step in range(3):
            for key, tensors in buckets.items():
                store.put(key, tensors)
                assert held(tensors) == [0, 0, 0, 0]
            for key, tensors in buckets.items():
                if key % 2:
                    store.prefetch(key)
                store.get(key)
                assert all(map(torch.equal, tensors, kept[key]))
                for x, y in zip(tensors, kept[key], strict=True):
                    x.add_(step)
                    y.add_(step)
        assert list(tmp_path.iterdir()) == []


def test_bytes_of_the_file_and_on_the_way_are_the_closed_forms(store):
    sizes = {key: sum(x.nbytes for x in tensors_of(1000 * (key + 1))) for key in range(4)}
    for key in sizes:
        tensors = tensors_of(1000 * (key + 1))
        store.put(key, tensors)
        store.get(key)
        store.put(key, tensors, changed=False)  # the file has it: nothing is written
        store.get(key)
    assert store.file_bytes == store.traffic.written == file_bytes(sizes) == store.traffic.read / 2


def test_a_place_in_the_file_is_used_again(store):
    for _ in range(3):
        for key in range(3):
            store.put(key, [torch.randn(4096)])
            store.drop(key)
    assert store.file_bytes == 3 * 4 * 4096
    store.put(0, [torch.randn(1024)])  # less: three of its blocks are for somebody else
    store.put(7, [torch.randn(3 * 1024)])
    assert store.file_bytes == 3 * 4 * 4096


def test_what_was_dropped_is_not_loaded(store):
    store.put(0, tensors := tensors_of())
    store.prefetch(0)
    store.drop(0)
    store.get(0)
    assert held(tensors) == [0, 0, 0, 0]
    store.get("never put")
    store.prefetch("never put")


class Keeping(DiskStore):
    """The mutant: copies each bucket to host memory as it goes."""

    def put(self, key, tensors, changed=True):
        self.copies = {**getattr(self, "copies", {}), key: [x.clone() for x in tensors]}
        super().put(key, tensors, changed)


@pytest.mark.parametrize("make", [DiskStore, Keeping])
@pytest.mark.parametrize("buckets", [4, 64])
def test_host_memory_is_that_of_the_buffers_whatever_is_stored(make, buckets, tmp_path):
    """By the tracker exactly, and by the process's resident set within 6 MB of it."""
    size, warm = 2**20, [torch.zeros(2**18)]
    with make(tmp_path, buffer_bytes=2**18, buffer_count=4) as store:
        store.put("warm", warm)
        store.get("warm")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what tests before this one freed would hold buckets without growing
        before = psutil.Process().memory_info().rss
        with memory.track() as t:
            for key in range(buckets):
                store.put(key, [torch.full((size // 4,), float(key))])
        grown = psutil.Process().memory_info().rss - before
        assert (t.now.total == 0) == (make is DiskStore)
        if make is DiskStore:
            assert t.peak.total <= size + 4096 and grown < 6e6
        elif buckets == 64:
            assert t.now.total >= 64 * size and grown > 50e6


def test_the_trackers_bytes_of_the_buffers_are_the_closed_form(tmp_path):
    with memory.track() as t, DiskStore(tmp_path, buffer_bytes=16384, buffer_count=6) as store:
        store.put(0, [torch.zeros(8)])
        assert t.now.total == buffers_bytes(16384, 6)


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (2, torch.float32), (4, torch.bfloat16)])
@on_ranks("world")
def test_training_is_bit_equal_to_the_devices_also_after_save_and_load(comm, world, dtype, tmp_path):
    """Under the store, and continued from its state under none and another."""
    for make in STAGES:
        with DiskStore(tmp_path, **SMALL) as store, DiskStore(tmp_path, buffer_bytes=2**16) as other:
            assert continued(comm, make, dtype, 6, store, (None, other), tmp_path / make.__name__) == [True] * 4


class WritingNothingBack(DiskStore):
    """The mutant: takes every bucket for unchanged."""

    def put(self, key, tensors, changed=True):
        super().put(key, tensors, changed=False)


@pytest.mark.parametrize("make", [DiskStore, WritingNothingBack])
def test_a_store_that_forgets_to_write_back_trains_another_model(make, tmp_path):
    expected = alone(Zero1)
    with make(tmp_path, **SMALL) as store:
        engine = alone(Zero1, store=store)
        for each in (expected, engine):
            train_gpt(each, 4)
        assert equal(parameters_of(expected), parameters_of(engine)) == (make is DiskStore)


def test_a_flipped_bit_is_found(store):
    store.put("bucket", tensors := tensors_of())
    store.flush()
    real = os.preadv
    def flip(fd, buffers, offset):
        count = real(fd, buffers, offset)
        buffers[0][100] ^= 4
        return count
    with patch.object(os, "preadv", flip):
        with pytest.raises(DamagedBlock, match="bytes .* of bucket were not read as they were written"):
            store.get("bucket")
    assert held(tensors) == [0, 0, 0, 0]
    store.get("bucket")  # the disk has it: a reading that failed can be made again
    assert sum(held(tensors)) > 0


def test_a_full_disk_costs_no_state_and_the_put_can_be_made_again(store):
    tensors = tensors_of()
    kept, full = [x.clone() for x in tensors], OSError(28, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(StoreError, match="disk is full"):
        store.put(0, tensors)
    assert all(map(torch.equal, tensors, kept))
    store.put(0, tensors)
    store.get(0)
    assert all(map(torch.equal, tensors, kept))


def test_a_write_that_failed_behind_the_callers_back_is_said_by_whatever_comes_next(store):
    with patch.object(os, "pwritev", side_effect=OSError(5, "Input/output error")):
        store.put(0, tensors_of(10))
        with pytest.raises(StoreError, match="cannot write 4,096 bytes at 0 .* the device failed"):
            store.flush()
    for call in (store.get, store.prefetch, store.drop, lambda key: store.put(key, [])):
        with pytest.raises(StoreError, match="the device failed"):
            call(1)


@pytest.mark.parametrize(("options", "told"), [
    ({"buffer_bytes": 1000}, "buffer_bytes=1,000: .* pass a multiple of 4,096"),
    ({"buffer_bytes": 6000}, "a multiple of 4,096"), ({"buffer_count": 3}, "buffer_count=3: half"),
    ({"buffer_count": 0}, "at least 2"), ({"thread_count": 0}, "thread_count=0: pass at least 1"),
    ({"capacity_bytes": -1}, "capacity_bytes=-1"), ({"buffer_bytes": 8192.0}, "buffer_bytes=8192.0: pass an integer"),
    ({"thread_count": True}, "thread_count=True"), ({"capacity_bytes": float("nan")}, "capacity_bytes=nan")])
def test_sizes_that_do_not_go_together(tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        DiskStore(tmp_path, **options)


def test_a_capacity_that_is_too_small_says_the_least_that_would_do(tmp_path):
    with DiskStore(tmp_path, capacity_bytes=8192, **SMALL) as store:
        store.put(0, [torch.zeros(1024)])
        with pytest.raises(StoreError, match="1 has 8,192 bytes, and 4,096 of .*8,192 are taken: pass at least 12,288"):
            store.put(1, x := [torch.ones(2048)])
        assert x[0].sum() == 2048


def test_a_store_is_closed_once_and_not_used_afterwards(tmp_path):
    store = DiskStore(tmp_path, **SMALL)
    store.close()
    with DiskStore(tmp_path, **SMALL) as other:
        other.put(0, [torch.zeros(3)])
    for each in (store, other):
        for call in (each.close, lambda each=each: each.get(0), lambda each=each: each.put(0, [])):
            with pytest.raises(RuntimeError, match="this DiskStore is closed"):
                call()


def test_a_store_serves_one_engine(store):
    check_one_engine(store)


def test_a_key_put_twice_is_refused(store):
    store.put(0, [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="0 was put twice without a get between"):
        store.put(0, [torch.zeros(3)])


def test_a_link_sets_the_pace(tmp_path):
    link = Link(bytes_per_second=4e6, latency=1e-3)
    with DiskStore(tmp_path, buffer_bytes=65536, buffer_count=4, link=link) as store:
        begun = time.monotonic()
        store.put(0, [torch.zeros(100_000)])
        store.get(0)
        blocks = -(-400_000 // 65536)
        assert time.monotonic() - begun >= 2 * (aligned(400_000) / 4e6 + blocks * 1e-3)


def test_a_store_that_nobody_closed_leaves_no_thread(tmp_path):
    before, store = threading.active_count(), DiskStore(tmp_path, **SMALL)
    store.put(0, [torch.zeros(3)])
    assert threading.active_count() == before + 3
    store.flush()
    del store
    deadline = time.monotonic() + 5  # a thread that has just ended its last job may be the last to know the store
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()
    assert threading.active_count() == before


def test_in_a_dry_run_no_byte_is_moved(tmp_path):
    with DiskStore(tmp_path, **SMALL) as store:
        t = memory.dry_run(lambda: train_gpt(alone(Zero1, store=store), 2))
        assert t.now["optimizer state"] < 1000 and store.traffic.written > 0
