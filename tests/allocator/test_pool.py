"""Tensors of a pool never overlap, nothing is lost, and everything joins again; errors say what."""

import math
import random
import sys
import threading

import pytest
import torch
from counting import Counted
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.allocator import GPUMemoryPool, PoolExhausted
from refimpl.allocator.holes import CHUNK, ByPlace, BySize

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
POLICIES = pytest.mark.parametrize("policy", ["first_fit", "best_fit"])
STEPS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 60), st.sampled_from(DTYPES)),
                 max_size=60)


def pool_of(nbytes, **options):
    return GPUMemoryPool(nbytes, device="cpu", **options)


def check(pool):
    live, holes = [(begin, size) for begin, size, *_ in pool._live.values()], sorted(pool._sizes.items())
    every = sorted(live + holes)
    assert all(a + size <= b for (a, size), (b, _) in zip(every, every[1:], strict=False)), "no overlap"
    assert sum(size for _, size in every) == pool.capacity, "nothing lost"
    assert sum(size for _, size in live) == pool.allocated
    assert all(a + size < b for (a, size), (b, _) in zip(holes, holes[1:], strict=False)), "no two holes touch"
    assert pool.largest_hole == max((size for _, size in holes), default=0)


@POLICIES
@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_any_sequence_keeps_the_contents_of_live_tensors(policy, steps):
    pool, live = pool_of(4096, policy=policy), []
    for i, (which, rows, columns, dtype) in enumerate(steps):
        if which < len(live):
            tensor, value = live.pop(which)
            assert bool((tensor == value).all())
            pool.free(tensor)
        else:
            tensor = pool.allocate((rows, columns), dtype)
            value = torch.tensor(i % 2 if dtype == torch.bool else i).to(dtype)
            assert tensor.shape == (rows, columns) and tensor.dtype == dtype and tensor.is_contiguous()
            assert tensor.data_ptr() % 512 == 0
            live.append((tensor.fill_(value), value))
        check(pool)
    for tensor, value in live:
        assert bool((tensor == value).all())
        pool.free(tensor)
    assert pool.allocated == pool.requested == 0
    assert len(pool._sizes) == len(pool.segments), "each segment is one hole again"
    pool.close()


def holes_of(pool, sizes):
    """Make holes of these sizes, in this order, with live tensors between them."""
    tensors = []
    for size in sizes:
        tensors += [pool.allocate(size, torch.uint8), pool.allocate(512, torch.uint8)]
    for tensor in tensors[::2]:
        pool.free(tensor)
    return [tensor.data_ptr() for tensor in tensors[::2]]


def test_first_fit_takes_the_first_hole_and_best_fit_the_smallest():
    for policy, expected in (("first_fit", 0), ("best_fit", 2)):
        pool = pool_of(2**20, policy=policy)
        places = holes_of(pool, [4096, 1024, 2048, 8192])
        assert pool.allocate(1536, torch.uint8).data_ptr() == places[expected]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 1000)), min_size=1, max_size=600,
                unique_by=lambda hole: hole[0]), st.data())
@settings(max_examples=40, deadline=None)
def test_the_holes_that_are_found_are_those_of_a_scan(holes, data):
    by_place, by_size = ByPlace(), BySize()
    for place, size in holes:
        by_place.add(place, size), by_size.add(place, size)
    gone = data.draw(st.sets(st.sampled_from(holes)))
    for place, size in gone:
        by_place.remove(place, size), by_size.remove(place, size)
    left = [hole for hole in holes if hole not in gone]
    assert by_place.largest == by_size.largest == max((size for _, size in left), default=0)
    for size in (1, 10, 500, 990, 1001):
        fitting = [hole for hole in left if hole[1] >= size]
        assert by_place.find(size) == min(fitting, default=None)
        assert by_size.find(size) == min(fitting, key=lambda hole: hole[::-1], default=None)


def test_a_search_among_many_holes_reads_few():
    holes = ByPlace()
    for place in range(0, 10**5, 2):
        holes.add(place, 1 + place % 7)
    holes.add(10**6, 100)
    holes._tree = Counted(holes._tree)
    assert holes.find(50) == (10**6, 100) and holes._tree.looked <= 2 + math.log2(2 * 10**5 / CHUNK)


def test_a_search_looks_at_one_node_for_each_doubling_of_the_chunks():
    holes, looked = ByPlace(), {}
    for place in range(8 * CHUNK):
        holes.add(place, 1)
        if (chunks := len(holes._chunks)) not in looked:
            plain, holes._tree = holes._tree, Counted(holes._tree)
            holes.find(1)
            looked[chunks], holes._tree = holes._tree.looked, plain
    assert all(looked[chunks] == 1 + math.ceil(math.log2(chunks)) for chunks in range(1, 9))


@POLICIES
def test_it_grows_by_segments_and_moves_nothing(policy):
    pool = pool_of(1024, policy=policy)
    first = pool.allocate(256).fill_(7)
    address, second = first.data_ptr(), pool.allocate(10_000)
    assert first.data_ptr() == address and bool((first == 7).all()) and second.nbytes == 40_000
    assert len(pool.segments) == 2 and pool.capacity == 1024 + 40_448


def test_a_pool_takes_as_much_as_it_may():
    pool = pool_of(2048, max_capacity=4096)
    tensors = [pool.allocate(128) for _ in range(8)]
    assert pool.capacity == pool.allocated == 4096
    with pytest.raises(PoolExhausted, match="4096 of at most 4096 are in segments, 4096 of these live, and the largest "
                                            "hole has 0"):
        pool.allocate(1)
    pool.free(tensors[0]), pool.free(tensors[2])
    assert pool.fragmentation == 0.5
    with pytest.raises(PoolExhausted, match="the largest hole has 512"):
        pool.allocate(256)
    pool.free(tensors[1])
    assert pool.fragmentation == 0 and pool.allocate(384).nbytes == 1536


def test_what_is_not_a_live_tensor_of_the_pool():
    pool, other = pool_of(4096), pool_of(4096)
    x = pool.allocate((4, 4))
    for tensor, said in ((x[1:], "is a view of one"), (x.view(16), "is a view of one"),
                         (torch.ones(3), "it is not from this pool"), (other.allocate(4), "it is not from this pool")):
        with pytest.raises(ValueError, match=said):
            pool.free(tensor)
    pool.free(x)
    y = pool.allocate((4, 4))
    assert y.data_ptr() == x.data_ptr(), "another has its address now"
    with pytest.raises(ValueError, match="it was freed before"):
        pool.free(x)
    assert pool.allocated == 512
    check(pool)


def test_what_the_system_refuses_is_exhausted_and_nothing_is_lost():
    pool = pool_of(4096)
    x = pool.allocate(1024).fill_(3)
    with pytest.raises(PoolExhausted, match="cpu has no room for another segment; 4096 of 4096 bytes are live"):
        pool.allocate(2**50, torch.uint8)
    assert pool.allocate(4).nbytes == 16 and bool((x == 3).all())
    check(pool)


def test_a_segment_as_large_as_all_others_is_not_insisted_on(monkeypatch):
    pool, real = pool_of(2**20), torch.empty

    def little(size, **options):
        if isinstance(size, int) and size > 2**16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(size, **options)

    pool.allocate(2**18)
    monkeypatch.setattr(torch, "empty", little)
    assert pool.allocate(64).nbytes == 256 and pool.capacity == 2**20 + 512


def test_threads_share_a_pool():
    """Each finds in its tensors what it wrote there."""
    pool, wrong = pool_of(2**16), []

    def work(number):
        dice, live = random.Random(number), []
        for i in range(400):
            if len(live) > 5:
                tensor, value = live.pop(dice.randrange(len(live)))
                wrong.extend([value] * int((tensor != value).sum()))
                pool.free(tensor)
            live.append((pool.allocate(dice.randrange(1, 900)).fill_(1000 * number + i), 1000 * number + i))
        for tensor, _ in live:
            pool.free(tensor)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    before, _ = sys.getswitchinterval(), sys.setswitchinterval(1e-6)
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.setswitchinterval(before)
    assert not wrong and pool.allocated == 0
    check(pool)


@pytest.mark.parametrize("shape", [0, -1, (3, 0), (3, -2)])
def test_shapes_without_elements(shape):
    with pytest.raises(ValueError, match="expected at least one element"):
        pool_of(4096).allocate(shape)


@pytest.mark.parametrize(("options", "said"), [
    ({"initial_capacity": 0}, "initial_capacity=0"), ({"alignment": 100}, "alignment=100"), ({"alignment": 8}, "16 or"),
    ({"policy": "worst_fit"}, "policy='worst_fit': expected one of first_fit, best_fit"),
    ({"max_capacity": 10}, "max_capacity=10")])
def test_options_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        GPUMemoryPool(**{"initial_capacity": 4096, "device": "cpu", **options})


@pytest.mark.parametrize(("make", "said"), [
    (lambda: GPUMemoryPool("1GiB"), "initial_capacity='1GiB': expected an integer, bytes"),
    (lambda: GPUMemoryPool(4096, max_capacity=1e6), "max_capacity=1000000.0: expected an integer"),
    (lambda: pool_of(4096).allocate(128, 64), "dtype=64: expected one of torch's"),
    (lambda: pool_of(4096).allocate((4,), "float32"), "dtype='float32'")])
def test_types_that_cannot_be(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def test_a_shape_may_be_a_list():
    assert pool_of(4096).allocate([3, 2]).shape == (3, 2)


def test_closing():
    with pytest.raises(ValueError, match="1 tensors of 512 bytes are live"), pool_of(4096) as pool:
        x = pool.allocate(4)
    pool.free(x), pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.allocate(4)
    with pytest.raises(ZeroDivisionError), pool_of(4096) as pool:
        pool.allocate(4)
        raise ZeroDivisionError
