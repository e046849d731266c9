"""Copies between two memories: locked pages live as long as their tensors, and links of a known rate take turns."""

import gc
import time

import pytest
import torch

from refimpl import memory
from refimpl.comm import Link
from refimpl.offload import copies
from refimpl.offload.copies import LockedPages, SimulatedLink, host_bytes, link_of

CPU = torch.device("cpu")


class Driver:
    """Stands for CUDA's runtime: notes which pages are locked, and reads them when they are unlocked."""

    def __init__(self, error=0):
        self.error, self.locked, self.asked = error, {}, []

    def cudaHostRegister(self, address, nbytes, flags):
        self.asked.append(("lock", nbytes))
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        nbytes = self.locked.pop(address)
        copies.ctypes.string_at(address, nbytes)  # still there: else the process ends here
        self.asked.append(("unlock", nbytes))


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_pages_are_locked_until_the_last_tensor_on_them_is_gone(driver):
    flat = host_bytes(10_000, torch.device("cuda", 0))
    view = flat.view(torch.bfloat16)[100:]
    view.fill_(1.0)
    del flat
    gc.collect()
    assert driver.asked == [("lock", 10_000)] and view.sum() == len(view)
    del view
    gc.collect()
    assert driver.asked == [("lock", 10_000), ("unlock", 10_000)] and not driver.locked


def test_pages_that_the_driver_does_not_lock_are_named(driver):
    driver.error = 2
    with pytest.raises(RuntimeError, match=r"does not lock 4096 bytes of host memory \(CUDA error 2\)"):
        LockedPages(-1, 4096)
    gc.collect()
    assert driver.asked == [("lock", 4096)]


def test_memory_of_the_host_is_marked_and_nothing_is_locked_on_a_cpu(driver):
    with memory.track() as t:
        kept = [host_bytes(1000, CPU), host_bytes(0, torch.device("cuda", 0))]
    assert t.now["host memory"] == 1000 and not driver.asked and len(kept) == 2


def test_a_rehearsal_copies_at_once_and_takes_the_links_time():
    link, source = SimulatedLink(Link(1e6, 0.01)), torch.arange(10_000, dtype=torch.uint8)
    targets = [torch.zeros_like(source) for _ in range(3)]
    begin = time.monotonic()
    first = link.start("to host", [(targets[0], source)], source)
    second = link.start("to host", [(targets[1], source)], source)
    other = link.start("to device", [(targets[2], source)], source, after=first)
    assert all(torch.equal(target, source) for target in targets) and not first.is_done()
    assert [round(copy.end - begin, 2) for copy in (first, second, other)] == [0.02, 0.04, 0.04]
    link.finish()
    assert time.monotonic() - begin >= 0.04 and second.is_done() and other.is_done()


def test_without_a_rate_copies_take_no_time():
    link, source = link_of(CPU), torch.ones(8, dtype=torch.uint8)
    copy = link.start("to host", [(torch.zeros_like(source), source)], source)
    assert copy.is_done()
    copy.wait(), copy.finish(), link.finish()
