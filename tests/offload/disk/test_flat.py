"""Tensors as one run of bytes; storages that are emptied and filled."""

import pytest
import torch

from refimpl.offload.disk.buffer_pool import Buffer
from refimpl.offload.disk.flat import Flat, check_own_storages, empty, fill


@pytest.mark.parametrize("size", [4096, 8192])
def test_any_stretch_is_copied_out_and_back(size):
    tensors = [torch.randn(1000), torch.randn(7, 3).bfloat16(), torch.zeros(0), torch.tensor(3), torch.randn(2000)]
    whole = b"".join(bytes(x.reshape(-1).view(torch.uint8).tolist()) for x in tensors)
    flat, buffer, others = Flat(tensors), Buffer(size, False), [torch.zeros_like(x) for x in tensors]
    back = Flat(others)
    assert flat.nbytes == len(whole)
    for begin in range(0, flat.nbytes, size):
        buffer.array[:] = 255
        count, part = flat.copy_out(buffer, begin), whole[begin : begin + size]
        assert count == len(part) and bytes(buffer.array[:count]) == part
        assert not buffer.array[count : -(-count // 4096) * 4096].any()  # the rest of a block is zeros
        back.copy_back(buffer, begin)
    assert all(map(torch.equal, tensors, others))


def test_a_buffer_is_aligned():
    assert Buffer(8192, False).tensor.data_ptr() % 4096 == 0


def test_storages_are_emptied_and_filled():
    tensors = [torch.randn(3), torch.randn(5 * 2**20)]
    kept = [x.clone() for x in tensors]
    empty(tensors)
    assert [x.untyped_storage().nbytes() for x in tensors] == [0, 0]
    fill(tensors)
    for x, y in zip(tensors, kept, strict=True):
        x.copy_(y)
    assert all(map(torch.equal, tensors, kept))


def test_tensors_that_share_storages_are_refused():
    x = torch.randn(10)
    for tensors in ([x[:5]], [x.view(2, 5).t()]):
        with pytest.raises(ValueError, match="tensor 0 of key .* shares its storage with no other"):
            check_own_storages("key", tensors)
    with pytest.raises(ValueError, match="two tensors of key share a storage"):
        check_own_storages("key", [x, x.view(2, 5)])
