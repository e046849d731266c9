"""Rules of PyTorch's allocator at their boundaries; invariants under any sequence; the paper's addresses."""

import random
from unittest import mock

import pytest
from allocator_kit import mutants
from hypothesis import given, settings
from hypothesis import strategies as st
from one_screen import check_paper

from refimpl.allocator import CachingAllocator, OutOfMemory, Settings, paper
from refimpl.allocator import settings as constants
from refimpl.allocator.device import VirtualDevice
from refimpl.allocator.settings import MIB

CONFIGS = ["", "expandable_segments:True", "max_split_size_mb:20", "max_split_size_mb:32,roundup_power2_divisions:8",
           "garbage_collection_threshold:0.3"]
CAPACITY = 160 * MIB


def check(allocator):
    """Blocks do not overlap, make up what is reserved, and free neighbours are one."""
    free = [block for pool in allocator.pools.values() for block in pool]
    blocks = sorted([*free, *allocator.live.values()], key=lambda block: block.address)
    assert all(a.end <= b.address for a, b in zip(blocks, blocks[1:], strict=False))
    assert sum(block.size for block in blocks) == allocator.reserved == allocator.device.used
    assert sum(block.size for block in allocator.live.values()) == allocator.allocated
    for block in free:
        assert block.free and block.mapped and not block.waits_for
        assert block.after is None or not (block.after.free and block.after.mapped) or block.after.waits_for


class Lists:
    """A device for the paper: addresses as a VirtualDevice has them."""

    def __init__(self, capacity):
        self.device, self.sizes = VirtualDevice(capacity), {}

    def malloc(self, nbytes):
        address = self.device.malloc(nbytes)
        if address is not None:
            self.sizes[address] = nbytes
        return address

    def free(self, address):
        self.device.free(address, self.sizes.pop(address))


def beside_the_paper(steps=4000, seed=0):
    """Whether both give the same addresses, and reserve the same."""
    lists, dice = Lists(CAPACITY), random.Random(seed)
    one, other, live = paper.CachingAllocator(lists.malloc, lists.free), CachingAllocator(CAPACITY), []
    for _ in range(steps):
        if live and dice.random() < 0.5:
            a, b = live.pop(dice.randrange(len(live)))
            one.release(a), other.free(b)
        else:
            nbytes, stream, found = int(2 ** dice.uniform(*dice.choice([(0, 25), (20, 24)]))), dice.randrange(2), []
            for each in (one, other):
                try:
                    found.append(each.allocate(nbytes, stream))
                except MemoryError:
                    found.append(None)
            if None in found:
                if found != [None, None]:
                    return False
                for a, b in live[::2]:
                    one.release(a), other.free(b)
                live = live[1::2]
                continue
            live.append(found)
            if found[0].address != found[1].address:
                return False
        if (one.reserved, one.allocated) != (other.reserved, other.allocated):
            return False
    return True


def test_the_addresses_of_one_screen():
    assert all(beside_the_paper(seed=seed) for seed in range(3))


@pytest.mark.parametrize(("name", "value"), [
    ("BLOCK", 1024), ("SMALL", 2 * MIB), ("SMALL_SEGMENT", 4 * MIB), ("MIN_LARGE", 8 * MIB), ("ROUND_LARGE", MIB)])
def test_another_constant_gives_other_addresses(name, value):
    with mock.patch.object(constants, name, value):
        assert not all(beside_the_paper(seed=seed) for seed in range(3))


@pytest.mark.parametrize("name", mutants())
def test_another_rule_gives_other_addresses(name):
    owner, method, mutant = mutants()[name]
    with mock.patch.object(owner, method, mutant):
        assert not all(beside_the_paper(seed=seed) for seed in range(3))


def test_one_screen_that_is_read_first():
    check_paper("allocator")


@pytest.mark.parametrize("config", CONFIGS)
@given(steps=st.lists(st.tuples(st.integers(0, 30), st.floats(0, 25), st.integers(0, 1), st.booleans()), max_size=120))
@settings(max_examples=40, deadline=None)
def test_invariants_of_any_sequence(config, steps):
    allocator, live = CachingAllocator(CAPACITY, Settings.parse(config, memory_fraction=0.9)), []
    for which, power, stream, other in steps:
        if which < len(live):
            block = live.pop(which)
            if other:
                allocator.record_stream(block, 5)
            allocator.free(block)
        else:
            try:
                live.append(allocator.allocate(int(2**power), stream))
            except OutOfMemory:
                allocator.synchronize()
                live, gone = live[::2], live[1::2]
                for block in gone:
                    allocator.free(block)
        check(allocator)
        assert allocator.reserved <= 0.9 * CAPACITY
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == allocator.requested == allocator.device.used == 0


def freed(allocator, nbytes, **options):
    """The address of a block that is free again."""
    block = allocator.allocate(nbytes, **options)
    address = block.address
    allocator.free(block)
    return address


def test_streams_do_not_share_free_blocks():
    allocator = CachingAllocator()
    address = freed(allocator, 5 * MIB, stream=1)
    assert allocator.allocate(5 * MIB, stream=2).address != address
    assert allocator.allocate(5 * MIB, stream=1).address == address


def test_a_block_that_another_stream_uses_is_free_when_that_is_done():
    allocator = CachingAllocator()
    block = allocator.allocate(5 * MIB)
    address = block.address
    allocator.record_stream(block, 3)
    allocator.record_stream(block, block.stream)  # its own stream need not be waited for
    allocator.free(block)
    assert allocator.allocate(5 * MIB).address != address
    allocator.synchronize(4)
    assert allocator.allocate(5 * MIB).address != address
    allocator.synchronize(3)
    assert allocator.allocate(5 * MIB).address == address


def test_private_pools_are_apart():
    allocator = CachingAllocator()
    address = freed(allocator, 5 * MIB, owner=(0, 1))
    assert allocator.allocate(5 * MIB).address != address
    assert allocator.allocate(5 * MIB, owner=(0, 1)).address == address


def test_large_blocks_stay_whole_with_max_split_size():
    plain, limited = CachingAllocator(), CachingAllocator(settings="max_split_size_mb:32")
    for allocator, same in ((plain, True), (limited, False)):
        address = freed(allocator, 40 * MIB)
        assert (allocator.allocate(2 * MIB).address == address) is same
    again = limited.allocate(39 * MIB)
    assert again.address == address and again.size == 40 * MIB, "as large a request may have it, whole"


def test_large_segments_go_back_before_all_others():
    """Two free ones of 40 MiB make room for 70, and small ones stay."""
    for config, left in (("max_split_size_mb:32", 2 * MIB), ("", 0)):
        allocator = CachingAllocator(110 * MIB, config)
        blocks = [allocator.allocate(nbytes) for nbytes in (40 * MIB, 40 * MIB, 512)]
        for block in blocks:
            allocator.free(block)
        assert allocator.allocate(70 * MIB).size == 70 * MIB
        assert allocator.reserved - 70 * MIB == left


def test_collection_takes_what_has_been_free_for_longer_than_the_average():
    allocator = CachingAllocator(200 * MIB, Settings.parse("garbage_collection_threshold:0.5", memory_fraction=1.0))
    old, young = allocator.allocate(30 * MIB), allocator.allocate(40 * MIB)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.allocate(2 * MIB, stream=1))  # of a segment of 20 MiB
    allocator.free(young)
    allocator.allocate(60 * MIB)  # 90 MiB are reserved, below 100: no collection
    assert allocator.reserved == (30 + 40 + 20 + 60) * MIB
    allocator.allocate(45 * MIB, stream=2)  # 150 are: 50 too many
    assert allocator.reserved == (60 + 46) * MIB, "first that of 30 MiB, then, as it is not enough, the others, too"
    allocator = CachingAllocator(200 * MIB, Settings.parse("garbage_collection_threshold:0.7", memory_fraction=1.0))
    old, young = allocator.allocate(50 * MIB), allocator.allocate(40 * MIB)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.allocate(2 * MIB, stream=1))
    allocator.free(young)
    allocator.allocate(60 * MIB)
    allocator.allocate(20 * MIB, stream=2)  # 170 were reserved, 30 too many
    assert allocator.reserved == (40 + 20 + 60 + 20) * MIB, "that of 50 MiB is the oldest, and enough"


def test_an_expandable_segment_grows_into_what_is_free_before_it():
    rigid, expandable = CachingAllocator(100 * MIB), CachingAllocator(100 * MIB, "expandable_segments:True")
    for allocator in (rigid, expandable):
        blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
        for block in blocks[1:]:
            allocator.free(block)
    last = expandable.allocate(65 * MIB)
    assert last.address == blocks[1].address and expandable.reserved == 100 * MIB
    assert rigid.allocate(65 * MIB).size == 66 * MIB and rigid.reserved == 96 * MIB, "after both others went back"
    blocks = [CachingAllocator(100 * MIB, config) for config in ("", "expandable_segments:True")]
    for allocator, fails in zip(blocks, (True, False), strict=True):
        held = [allocator.allocate(30 * MIB - 2 * MIB), allocator.allocate(30 * MIB), allocator.allocate(2 * MIB)]
        allocator.free(held[1])
        if fails:
            with pytest.raises(OutOfMemory, match="68157440 bytes for a request of 68157440"):
                allocator.allocate(65 * MIB)
        else:
            with pytest.raises(OutOfMemory):
                allocator.allocate(75 * MIB)


def test_errors():
    allocator = CachingAllocator(10 * MIB)
    with pytest.raises(ValueError, match="nbytes=-1"):
        allocator.allocate(-1)
    with pytest.raises(OutOfMemory, match="20971520 bytes for a request of 20971520: 0 of 10485760 bytes are reserved"):
        allocator.allocate(20 * MIB)
    block = allocator.allocate(3)
    allocator.free(block)
    with pytest.raises(ValueError, match="is not live: it was freed before"):
        allocator.free(block)
    with pytest.raises(ValueError, match="capacity=0"):
        CachingAllocator(0)
