"""An arena never gives an address to two, and lives as long as what is in it."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import memory
from refimpl.allocator.static import Arena


def make(arena, offset, count, **options):
    return arena.empty_strided(offset, (count,), (1,), torch.float32, 4 * count, **options)


def test_addresses_are_free_when_the_last_view_is_gone():
    arena = Arena(1024)
    x = make(arena, 128, 16, name="x").fill_(1)
    assert x.data_ptr() % 64 == 0 and x in arena and torch.ones(1) not in arena
    assert arena.live == {128: 192} and arena.name_at(128) == "x"
    assert arena.occupant(0, 128) is None and arena.occupant(0, 129) == arena.occupant(191, 1) == 128
    view = x.view(4, 4)[1]
    del x
    assert arena.live == {128: 192} and view.sum() == 4
    with pytest.raises(ValueError, match="bytes 100 to 164: a live tensor has 128 to 192"):
        make(arena, 100, 16)
    del view
    assert arena.live == {}


def test_it_takes_its_bytes_and_room_to_begin_at_a_multiple():
    for options, alignment in (({}, 64), ({"alignment": 512}, 512)):
        with memory.track() as t:
            arena = Arena(1024, **options)
        assert t.now.total == 1024 + alignment and make(arena, 0, 256).data_ptr() % alignment == 0


def test_what_autograd_saved_is_live():
    arena, w = Arena(1024), torch.ones(16, requires_grad=True)
    x = make(arena, 0, 16).fill_(3)
    y = (w * x).sum()
    del x
    assert arena.live == {0: 64}
    y.backward()
    assert arena.live == {} and w.grad.sum() == 48


def test_tensors_stay_when_the_arena_is_dropped():
    arena = Arena(1024)
    x = make(arena, 64, 100).fill_(7)
    del arena
    gc.collect()
    _other = [torch.zeros(272) for _ in range(50)]
    assert (x == 7).all()


@pytest.mark.parametrize(("offset", "count"), [(-64, 16), (1024, 16), (960, 17)])
def test_bytes_outside_are_named(offset, count):
    with pytest.raises(ValueError, match="the arena has 1024"):
        make(Arena(1024), offset, count)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 6), st.integers(0, 3)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_live_tensors_keep_their_values(requests):
    arena, held = Arena(20 * 64), []
    for i, (place, length, drop) in enumerate(requests):
        if arena.occupant(64 * place, 64 * min(length, 20 - place)) is None:
            held.append((i, make(arena, 64 * place, 16 * min(length, 20 - place)).fill_(i)))
        if drop == 0 and held:
            held.pop(0)
        assert all((x == value).all() for value, x in held) and len(arena.live) == len(held)
