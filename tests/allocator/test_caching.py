"""Rules of PyTorch's allocator at their boundaries; invariants under any sequence; the paper's addresses."""

import random
from unittest import mock

import pytest
from allocator_kit import OTHER_CONSTANTS, OTHER_RULES
from hypothesis import given, settings
from hypothesis import strategies as st
from one_screen import check_paper

from refimpl.allocator import CachingAllocator, OutOfMemory, Settings
from refimpl.allocator.device import VirtualDevice
from refimpl.allocator.settings import MIB
from refimpl.papers import caching_allocator as paper

CONFIGS = ["", "expandable_segments:True", "max_split_size_mb:20", "max_split_size_mb:32,roundup_power2_divisions:8",
           "garbage_collection_threshold:0.3"]
CAPACITY = 160 * MIB
LOWEST = Settings(version="2.11")  # of equal blocks that with the lowest address
BELOW_1 = 1 - 2**-40  # a fraction that leaves all of the memory


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


def papers(capacity):
    """The paper's allocator, with addresses as a VirtualDevice has them."""
    device, sizes = VirtualDevice(capacity), {}
    def malloc(nbytes):
        address = device.malloc(nbytes)
        sizes[address] = nbytes
        return address
    return paper.CachingAllocator(malloc, lambda address: device.free(address, sizes.pop(address)))


def allocated(allocator, nbytes, stream):
    try:
        return allocator.allocate(nbytes, stream)
    except MemoryError:
        return None


def beside_the_paper(seed):
    """Whether both give the same addresses, and reserve the same."""
    one, other, dice, live = papers(CAPACITY), CachingAllocator(CAPACITY, LOWEST), random.Random(seed), []
    for _ in range(4000):
        gone = []
        if live and dice.random() < 0.5:
            gone = [live.pop(dice.randrange(len(live)))]
        else:
            nbytes, stream = int(2 ** dice.uniform(*dice.choice([(0, 25), (20, 24)]))), dice.randrange(2)
            a, b = (allocated(each, nbytes, stream) for each in (one, other))
            if (a and a.address) != (b and b.address):
                return False
            if a is None:
                gone, live = live[::2], live[1::2]
            else:
                live.append((a, b))
        for a, b in gone:
            one.release(a), other.free(b)
        if (one.reserved, one.allocated) != (other.reserved, other.allocated):
            return False
    return True


def test_the_addresses_of_one_screen():
    assert all(beside_the_paper(seed) for seed in range(3))


@pytest.mark.parametrize("name", OTHER_CONSTANTS)
def test_another_constant_gives_other_addresses(name):
    with mock.patch.object(*OTHER_CONSTANTS[name]):
        assert not all(beside_the_paper(seed) for seed in range(3))


@pytest.mark.parametrize("name", OTHER_RULES)
def test_another_rule_gives_other_addresses(name):
    with mock.patch.object(*OTHER_RULES[name]):
        assert not all(beside_the_paper(seed) for seed in range(3))


def test_one_screen_that_is_read_first():
    check_paper("allocator", "caching_allocator")


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


def test_a_private_pool_that_is_in_use_keeps_its_segments():
    allocator = CachingAllocator(100 * MIB)
    freed(allocator, 30 * MIB), freed(allocator, 40 * MIB, owner=(0, 1))
    assert allocator.empty_cache() == 30 * MIB and allocator.reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(80 * MIB)
    allocator.gone.add((0, 1))
    assert allocator.allocate(80 * MIB).size == allocator.reserved == 80 * MIB


def test_nothing_goes_back_while_a_graph_is_captured():
    allocator = CachingAllocator(100 * MIB)
    freed(allocator, 60 * MIB)
    allocator.capturing = True
    with pytest.raises(OutOfMemory):
        allocator.allocate(80 * MIB)
    assert allocator.reserved == 60 * MIB


@pytest.mark.parametrize("owner", [(0, 0), (0, 1)])
def test_expandable_segments_are_of_private_pools_too(owner):
    allocator = CachingAllocator(100 * MIB, "expandable_segments:True")
    assert freed(allocator, 30 * MIB, owner=owner) == allocator.allocate(60 * MIB, owner=owner).address


def test_addresses_come_again():
    allocator = CachingAllocator()
    address = freed(allocator, 30 * MIB)
    allocator.empty_cache()
    assert allocator.allocate(40 * MIB).address == address


@pytest.mark.parametrize(("version", "lowest"), [("2.11", True), ("2.12", False), ("2.14", False)])
def test_of_equal_blocks_that_of_the_oldest_segment_is_taken_since_2_12(version, lowest):
    allocator = CachingAllocator(settings=Settings(version=version))
    first, second = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    low = first.address
    allocator.free(first)
    allocator.empty_cache()
    third = allocator.allocate(20 * MIB, stream=0)  # has the lower address, and is younger
    assert third.address == low
    allocator.free(second), allocator.free(third)
    assert (allocator.allocate(20 * MIB).address == low) is lowest


@pytest.mark.parametrize(("version", "limit"), [("2.12", 999), ("2.13", 1000)])
def test_a_fraction_of_the_memory_is_rounded_since_2_13(version, limit):
    assert CachingAllocator(1999, Settings(memory_fraction=0.5001, version=version)).limit == limit


def test_collection_needs_a_fraction_below_1():
    allocator = CachingAllocator(200 * MIB, Settings.parse("garbage_collection_threshold:0.1", memory_fraction=1.0))
    freed(allocator, 60 * MIB), allocator.allocate(80 * MIB)
    assert allocator.reserved == 140 * MIB


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
        for block in [allocator.allocate(nbytes) for nbytes in (40 * MIB, 40 * MIB, 512)]:
            allocator.free(block)
        assert allocator.allocate(70 * MIB).size == 70 * MIB and allocator.reserved - 70 * MIB == left


def with_free_blocks(threshold, old, young):
    """An allocator with two free blocks of so many MiB, between them ten uses of a segment of 20 MiB; and 60 MiB."""
    settings = Settings.parse(f"garbage_collection_threshold:{threshold}", memory_fraction=BELOW_1)
    allocator = CachingAllocator(200 * MIB, settings)
    old, young = allocator.allocate(old * MIB), allocator.allocate(young * MIB)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.allocate(2 * MIB, stream=1))
    allocator.free(young)
    allocator.allocate(60 * MIB)
    return allocator


def test_collection_takes_what_has_been_free_for_longer_than_the_average():
    allocator = with_free_blocks(0.5, 30, 40)  # 90 MiB were reserved before the last, below 100: no collection
    assert allocator.reserved == (30 + 40 + 20 + 60) * MIB
    allocator.allocate(45 * MIB, stream=2)  # 150 are: 50 too many
    assert allocator.reserved == (60 + 46) * MIB, "first that of 30 MiB, then, as it is not enough, the others, too"
    allocator = with_free_blocks(0.7, 50, 40)
    allocator.allocate(20 * MIB, stream=2)  # 170 were reserved, 30 too many
    assert allocator.reserved == (40 + 20 + 60 + 20) * MIB, "that of 50 MiB is the oldest, and enough"


def test_an_expandable_segment_grows_into_what_is_free_before_it():
    rigid, expandable = CachingAllocator(100 * MIB), CachingAllocator(100 * MIB, "expandable_segments:True")
    for allocator in (rigid, expandable):
        blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
        for block in blocks[1:]:
            allocator.free(block)
    assert expandable.allocate(65 * MIB).address == blocks[1].address and expandable.reserved == 100 * MIB
    assert rigid.allocate(65 * MIB).size == 66 * MIB and rigid.reserved == 96 * MIB, "after both others went back"
    for config, nbytes, said in (("", 65 * MIB, "68157440 bytes for a request of 68157440"),
                                 ("expandable_segments:True", 75 * MIB, None)):
        allocator = CachingAllocator(100 * MIB, config)
        _, middle, _ = [allocator.allocate(mib * MIB) for mib in (30 - 2, 30, 2)]
        allocator.free(middle)
        with pytest.raises(OutOfMemory, match=said):
            allocator.allocate(nbytes)


def test_addresses_that_went_back_belong_to_nobody_until_they_are_given_out_again():
    allocator = CachingAllocator(100 * MIB, "expandable_segments:True")
    freed(allocator, 30 * MIB)
    allocator.empty_cache()
    blocks = [allocator.allocate(30 * MIB, stream=stream) for stream in (1, 0)]
    first, second = sorted(blocks, key=lambda block: block.address)
    assert first.end <= second.address and allocator.reserved == 80 * MIB


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
