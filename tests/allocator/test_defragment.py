"""Live tensors move together and their owners follow; what nobody named is refused; both ways out of a full pool."""

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.allocator import GPUMemoryPool, OutOfMemory, PoolExhausted, defragment, replay
from refimpl.allocator.contiguous_region import ContiguousRegion, RegionPool, lives_long
from refimpl.allocator.defragment import CompactingPool
from refimpl.allocator.free_list import PlannedPool
from refimpl.common.allocations import Maker


def pool_of(nbytes, **options):
    return GPUMemoryPool(nbytes, device="cpu", max_capacity=nbytes, **options)


def after_a_hole(pool, shape):
    """A tensor before which something was freed."""
    hole, tensor = pool.allocate((64,)), pool.allocate(shape)
    pool.free(hole)
    return tensor


def model_in(pool):
    """A model and its optimizer whose parameters, gradients and states are in a pool, between holes."""
    model, spare = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)), []
    def placed(tensor):
        spare.append(pool.allocate((100,)))
        return pool.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    for parameter in model.parameters():
        parameter.data = placed(parameter.data)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = placed(torch.randn_like(parameter))
    optimizer.step()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = placed(state[name])
    for tensor in spare:
        pool.free(tensor)
    return model, optimizer


def test_a_training_goes_on_after_a_move():
    pool = pool_of(2**15)
    model, optimizer = model_in(pool)
    weights, plain = [p.data_ptr() for p in model.parameters()], copy.deepcopy(model)
    free = pool.capacity - pool.allocated
    assert pool.largest_hole < 0.9 * free
    found = defragment(pool, model, optimizer)
    assert found.after == pool.largest_hole == free > found.before
    assert found.repointed == 16 and found.moved == pool.allocated, "4 parameters with gradient and two states each"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] != weights
    x, other = torch.randn(4, 16), torch.optim.AdamW(plain.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, steps in ((model, optimizer), (plain, other)):
        steps.zero_grad()
        each(x).square().sum().backward()
        steps.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    again = defragment(pool, model, optimizer)
    assert (again.moved, again.repointed) == (0, 0)


def test_views_follow_and_stay_views():
    pool = pool_of(8192)
    x = after_a_hole(pool, (8, 8)).copy_(torch.arange(64.0).view(8, 8))
    row, column = x[2], x.t()[3]
    with pytest.raises(ValueError, match="2 tensors in segment 0 of the pool have an owner that was not named"):
        defragment(pool, x)
    assert x[2, 3] == 19 and pool.largest_hole < pool.capacity - pool.allocated, "nothing has moved"
    assert defragment(pool, [x, {"views": (row, column)}]).repointed == 3
    row.fill_(-1)
    assert x[2].tolist() == [-1] * 8 and column[2] == -1 and column.tolist()[:2] == [3, 11]
    pool.free(x)
    assert pool.allocated == 0 and pool.largest_hole == pool.capacity


def test_a_request_that_failed_is_served():
    pool = pool_of(64 * 512)
    blocks = [pool.allocate((128,)).fill_(i) for i in range(64)]
    for block in blocks[::2]:
        pool.free(block)
    kept = blocks[1::2]
    del blocks, block
    with pytest.raises(PoolExhausted, match="the largest hole has 512"):
        pool.allocate((32 * 128,))
    defragment(pool, kept)
    large = pool.allocate((32 * 128,)).zero_()
    assert [int(block[5]) for block in kept] == list(range(1, 64, 2)) and large.sum() == 0


def test_what_a_graph_saved_is_refused():
    pool = pool_of(8192)
    w = torch.nn.Parameter(after_a_hole(pool, (64,)).fill_(2))
    y = (w.view(8, 8) * w.view(8, 8)).sum()
    with pytest.raises(ValueError, match="call it when no graph waits for backward"):
        defragment(pool, w)
    y = (w * w).sum()  # the graph has the parameter itself
    with pytest.raises(ValueError, match="is used by [0-9] more than its owners: a graph that waits for backward"):
        defragment(pool, w)
    y.backward()
    del y
    assert defragment(pool, w).repointed == 1
    (w * w).sum().backward()
    assert w.detach().sum() == 128 and w.grad.sum() == 512


@pytest.mark.parametrize(("hold", "said"), [
    (lambda x: x.numpy(), "an owner that"), (torch.utils.dlpack.to_dlpack, "NumPy or DLPack"),
    (lambda x: x.untyped_storage(), "somebody holds the storage of segment 0"), (torch.Tensor.detach, "an owner that")])
def test_who_holds_the_memory_otherwise_is_not_left_behind(hold, said):
    pool = pool_of(8192)
    x = after_a_hole(pool, (8, 8)).fill_(2)
    held = hold(x)
    with pytest.raises(ValueError, match=said):
        defragment(pool, x)
    assert pool.largest_hole < pool.capacity - pool.allocated, "nothing has moved"
    del held
    assert defragment(pool, x).repointed == 1 and bool((x == 2).all())


def test_segments_are_closed_each():
    pool = GPUMemoryPool(2048, device="cpu")
    tensors = [pool.allocate((128,)).fill_(i) for i in range(12)]
    assert len(pool.segments) > 1
    kept = tensors[2::3]
    del tensors[2::3]
    while tensors:
        pool.free(tensors.pop())
    defragment(pool, kept)
    assert len(pool._sizes) == len(pool.segments), "one hole in each"
    assert [int(t[0]) for t in kept] == [2, 5, 8, 11]


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_pool_keeps_its_contents(requests):
    pool = GPUMemoryPool(2**20, device="cpu")
    made = [(pool.allocate((n,)).copy_(torch.arange(float(n)) + i), i, drop) for i, (n, drop) in enumerate(requests)]
    kept = [(tensor, i) for tensor, i, drop in made if not drop]
    for tensor, _, drop in made:
        if drop:
            pool.free(tensor)
    tensor = made = None
    defragment(pool, [tensor for tensor, _ in kept])
    assert all(torch.equal(tensor, torch.arange(float(len(tensor))) + i) for tensor, i in kept)
    assert pool.largest_hole == pool.capacity - pool.allocated
    for tensor, _ in kept:
        pool.free(tensor)
    assert pool.allocated == 0


def test_a_tensor_larger_than_its_move_goes_in_pieces(monkeypatch):
    monkeypatch.setattr(sys.modules[defragment.__module__], "PIECE", 1000)
    pool = pool_of(2**16)
    x = after_a_hole(pool, (5000,)).copy_(torch.arange(5000.0))
    assert defragment(pool, x).moved == 20480 and torch.equal(x, torch.arange(5000.0))


def test_other_owners_are_named():
    with pytest.raises(TypeError, match="a str owns no tensors"):
        defragment(pool_of(1024), "model")


def recomputing(layers=24, mib=2**20):
    """A step with recomputation: each layer keeps a checkpoint and frees what else it made; backward needs more."""
    maker, checkpoints = Maker(), []
    for _ in range(layers):
        inner = [maker.alloc(3 * mib) for _ in range(3)]
        checkpoints.append(maker.alloc(mib, "checkpoints"))
        for block in inner:
            maker.free(block)
    for checkpoint in reversed(checkpoints):
        for block in [*(maker.alloc(4 * mib) for _ in range(3)), checkpoint]:
            maker.free(block)
    return maker.trace()


def test_a_trace_that_fails_runs_by_moving_or_by_regions():
    trace = recomputing()
    capacity = trace.peak
    failed = replay(trace, PlannedPool(capacity))
    assert failed.failure is not None and failed.failure.free >= failed.failure.nbytes > failed.failure.largest
    long = [trace.category_of(block) == "checkpoints" for block in range(len(trace.blocks))]
    moving, regions = CompactingPool(capacity), RegionPool(trace, capacity, long)
    assert replay(trace, moving).failure is None and moving.moved > 0
    assert replay(trace, regions).failure is None and regions.region_bytes == 24 * 2**20
    assert moving.allocated == regions.allocated == regions.requested == 0 and regions.reserved <= capacity


def test_a_compacting_pool_fails_only_if_too_little_is_free():
    pool = CompactingPool(10 * 512)
    blocks = [pool.allocate(512) for _ in range(10)]
    for block in blocks[::2]:
        pool.free(block)
    large = pool.allocate(5 * 512)
    assert large.address == 5 * 512 and pool.moved == 5 * 512
    with pytest.raises(OutOfMemory):
        pool.allocate(1)
    for block in [large, *blocks[1::2]]:
        pool.free(block)
    assert pool.allocated == 0 and pool.largest_hole == 10 * 512


def test_a_region_keeps_copies_one_after_the_other():
    region = ContiguousRegion(4096, "cpu")
    kept = [region.copy_in(torch.full((100,), float(i)).requires_grad_()) for i in range(4)]
    assert [t.data_ptr() - kept[0].data_ptr() for t in kept] == [0, 512, 1024, 1536] and region.used == 2048
    assert [t[7].item() for t in kept] == [0, 1, 2, 3] and not kept[0].requires_grad
    with pytest.raises(OutOfMemory, match="the region has 4096, 2048 of them used"):
        region.copy_in(torch.zeros(1000))
    region.clear()
    assert region.copy_in(torch.ones(2, 3, dtype=torch.int64)).tolist() == [[1, 1, 1]] * 2


def test_regions_say_why_a_request_fails():
    trace = recomputing()
    assert 16 <= sum(lives_long(trace)) < 24, "the last checkpoints live briefly"
    failed = replay(trace, RegionPool(trace, trace.peak)).failure
    assert failed.nbytes == 4 * 2**20 > failed.largest
