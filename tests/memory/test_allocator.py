"""The allocator's readings."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType

from refimpl import memory
from refimpl.memory.allocator import _of_this_region


def test_peak_and_net_are_what_was_allocated():
    with memory.measure("cpu") as m:
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        c = torch.empty(250)
    assert (m.peak, m.net) == (6000, 3000)
    assert m.events and sum(nbytes for _, nbytes in m.events) == 3000
    assert b.numel() + c.numel() == 750


def test_what_a_kernel_takes_inside_one_operation_is_seen():
    x = torch.randn(64, 64, dtype=torch.float64)
    with memory.track(x) as t, memory.measure("cpu") as m:
        torch.linalg.svdvals(x)
    assert m.peak > t.peak.total - t.start.total


def test_the_release_of_older_memory_is_the_one_thing_the_cpus_log_leaves_out():
    held = [torch.empty(1000)]
    with memory.track(held) as t, memory.measure("cpu") as m:
        held.clear()
        new = torch.empty(10)
    assert (m.peak, m.net) == (40, 40)
    assert t.now.total - t.start.total == 40 - 4000 and new.numel() == 10


def test_a_later_region_does_not_count_what_an_earlier_one_gave_out():
    """The profiler remembers sizes from one region to the next; what is freed here but older is not ours."""
    held = []
    for size in range(100, 140):
        with memory.measure("cpu") as m:
            kept, freed = torch.empty(size), torch.empty(7)
            held.clear()
            del freed
        assert (m.peak, m.net) == (4 * size + 28, 4 * size)
        held.append(kept)
        del kept


def allocation(time, nbytes, address, device="cpu", children=()):
    fields = SimpleNamespace(device=torch.device(device), alloc_size=nbytes, ptr=address)
    return SimpleNamespace(tag=_EventType.Allocation, start_time_ns=time, extra_fields=fields, children=children)


def test_a_release_counts_if_its_address_was_given_out_here():
    operation = SimpleNamespace(tag=_EventType.TorchOp, children=[
        allocation(3, 50, 0xB), allocation(2, -8, 0xA), allocation(2, 70, 0xC, "cuda")])
    tree = [allocation(6, -60, 0xB), operation, allocation(1, -100, 0xB), allocation(4, -50, 0xB),
            allocation(5, -50, 0xB)]
    assert _of_this_region(tree) == [(3, 50), (4, -50)]


def test_readings_exist_after_the_context_only_and_survive_an_exception():
    m = memory.measure("cpu")
    with pytest.raises(RuntimeError, match="peak is known when the context has ended"):
        m.peak  # noqa: B018
    with pytest.raises(KeyError), m:
        kept = torch.empty(10)
        raise KeyError
    assert m.peak == kept.nbytes
    with pytest.raises(AttributeError, match="no 'peek'"):
        m.peek  # noqa: B018


def test_one_profiler_at_a_time():
    with memory.measure("cpu"), pytest.raises(RuntimeError, match="one is running"), memory.measure("cpu"):
        pass
    with memory.measure("cpu") as m:
        torch.empty(10)
    assert m.peak == 40


def test_an_unknown_device_is_named():
    for device in ("meta", "gpu"):
        with pytest.raises(ValueError, match=f"'{device}': expected 'cpu' or 'cuda'"):
            memory.measure(device)


def test_it_shows_itself():
    m = memory.measure("cpu")
    assert repr(m) == m._repr_html_() == "(measuring)"
    with m:
        torch.empty(300)
    assert repr(m).splitlines()[:2] == ["cpu", f"peak        {'1,200':>{len(repr(m).splitlines()[1]) - 12}}"]
    assert "<td>peak</td><td style='text-align:right'>1,200</td>" in m._repr_html_()
    assert "cuda" not in repr(m) and "reserved" not in repr(m)
