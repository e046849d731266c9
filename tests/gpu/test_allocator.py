"""PyTorch's allocator on a CUDA device: recordings replayed event by event, and its own tools."""

import gc

import pytest
import torch

from benchmarks.recordings import PROGRAMS, SHAPE, recorded, replayed
from refimpl import memory
from refimpl.allocator import AllocationTrace, GPUMemoryPool, replay
from refimpl.model import GPT, GPTConfig

MIB = 2**20


@pytest.fixture(autouse=True)
def clean(cuda):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return recorded(PROGRAMS, tmp_path_factory.mktemp("recordings"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_address_and_every_segment(recordings, name):
    snapshot = recordings[name]
    found = replayed(name, snapshot, torch.cuda.mem_get_info()[1])
    assert found.difference is None, repr(found)
    assert found.addresses == sum(entry["action"] == "alloc" for entry in snapshot.entries) > 30
    assert found.segments == sum(entry["action"].startswith("segment") for entry in snapshot.entries) > 0
    assert any(entry["action"] == "oom" for entry in snapshot.entries) is name.startswith("out_of_memory")


def test_what_a_step_reserves_is_predicted():
    """By a replay of what the tracker saw: within what libraries take for themselves."""
    model = GPT(GPTConfig(**SHAPE), device="cuda")
    tokens = torch.zeros(4, 1024, dtype=torch.int64, device="cuda")
    model(tokens, tokens).backward()
    model.zero_grad()
    with memory.track(model, tokens) as t:
        model(tokens, tokens).backward()
    predicted = replay(AllocationTrace.of(t, t.device)).peak
    model.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model(tokens, tokens).backward()
    assert abs(torch.cuda.max_memory_reserved() / predicted - 1) < 0.1


@pytest.mark.bytes
def test_a_mem_pool_keeps_its_segments_apart():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    owners = {segment["address"]: tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    at = {name: max(a for a in owners if a <= tensor.data_ptr()) for name, tensor in (("in", inside), ("out", outside))}
    assert owners[at["in"]] == tuple(pool.id) and owners[at["out"]] == (0, 0)


@pytest.mark.bytes
def test_a_fraction_limits_what_is_reserved():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * MIB) / total)
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.bytes
def test_empty_cache_gives_back_what_is_whole():
    kept = torch.empty(1024, dtype=torch.uint8, device="cuda")
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_reserved() >= 100 * MIB and torch.cuda.memory_reserved() >= 2 * MIB
    assert kept.numel() == 1024


def test_streams_share_addresses_and_not_free_blocks():
    side = torch.cuda.Stream()
    block = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
    address = block.data_ptr()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        assert (block + 1).sum().item() == 5 * MIB, "every stream can read it"
    torch.cuda.synchronize()
    del block
    with torch.cuda.stream(side):
        other = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert other.data_ptr() != address
    assert torch.empty(5 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_a_pool_of_real_tensors():
    before = torch.cuda.memory_allocated()
    with GPUMemoryPool(64 * MIB, device="cuda") as pool:
        tensors = [pool.allocate((256, 256), dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
        for i, tensor in enumerate(tensors):
            tensor.fill_(i)
        assert [tensor.float().mean().item() for tensor in tensors] == [0, 1, 2]
        assert torch.cuda.memory_allocated() - before <= 64 * MIB + 1024
        for tensor in tensors:
            pool.free(tensor)
        del tensors, tensor
    assert torch.cuda.memory_allocated() == before
