"""Numbers by themselves, on a build of torch without CUDA: what is turned on and off, and what is written where."""

import ctypes

import pytest
import torch

from refimpl.phantom import numbers, status

aten, SIZE = torch.ops.aten, 2**20 + 8


@pytest.fixture
def device(library, monkeypatch):
    """The library of a device that is on in this process."""
    if torch.version.cuda:
        pytest.skip("this torch has loaded other libraries of CUDA")
    monkeypatch.setenv(status.VARIABLE, str(library.parent))
    monkeypatch.setenv(f"{status.VARIABLE}_MEMORY", str(2**24))
    return status.libphantom()


def moves(device):
    """Whether a copy of more than a mebibyte to the device moves its bytes."""
    at, source = ctypes.c_void_p(), ctypes.create_string_buffer(b"7" * SIZE, SIZE)
    assert device.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(SIZE)) == 0
    assert device.cudaMemcpy(at, source, ctypes.c_size_t(SIZE), 1) == 0
    found = ctypes.string_at(at, SIZE)
    assert device.cudaFree(at) == 0
    return found == source.raw


def test_large_copies_move_bytes_while_there_are_numbers_and_no_longer(device):
    assert not moves(device)
    with numbers.Numbers():
        assert moves(device)
        with numbers.Numbers():
            assert moves(device)
        assert moves(device)
    assert not moves(device)


class There(torch.Tensor):
    """Says that it is on the device, whose memory is memory of the host."""

    device = torch.device("cuda", 0)


def test_what_an_operation_returns_and_what_it_writes_are_the_cpus(device, monkeypatch):
    """The device has computed something else: here the negative of what the CPU doubles."""
    monkeypatch.setitem(numbers.ON_THE_CPU, aten.neg.default, lambda x: 2 * x)
    monkeypatch.setitem(numbers.ON_THE_CPU, aten.neg_.default, lambda x: x.mul_(2))
    x = torch.ones(3).as_subclass(There)
    with numbers.Numbers():
        y, same = aten.neg(x), aten.neg_(x)
    assert y.tolist() == [2.0] * 3 and x.tolist() == [2.0] * 3 and same.data_ptr() == x.data_ptr()
