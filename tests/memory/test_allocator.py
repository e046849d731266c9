"""The allocator's readings."""

from types import SimpleNamespace

import pytest
import torch
from threads_kit import in_a_thread
from torch._C._profiler import _EventType

from refimpl import memory
from refimpl.memory.allocator import _all_threads_flag, _log_level, _of_this_region


def test_peak_and_net_are_what_was_allocated():
    with memory.measure("cpu") as m:
        held = [torch.empty(1000), torch.empty(500)]
        held[0] = None
        held.append(torch.empty(250))
    assert (m.peak, m.net) == (6000, 3000) and m.events and sum(nbytes for _, nbytes in m.events) == 3000


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
    assert (m.peak, m.net) == (40, 40) and t.now.total - t.start.total == 40 - 4000 and new.numel() == 10


def test_a_later_region_does_not_count_what_an_earlier_one_gave_out():
    """The profiler remembers sizes from one region to the next; what is freed here but older is not ours."""
    held = []
    for size in range(100, 140):
        with memory.measure("cpu") as m:
            kept, freed = torch.empty(size), torch.empty(7)
            held.clear()
            del freed
        assert (m.peak, m.net) == (4 * size + 28, 4 * size)
        held, kept = [kept], None


def test_what_other_threads_take_and_free_is_counted():
    held = []
    for function in (lambda: held.append(torch.empty(1000)), held.clear):
        with memory.measure("cpu") as m:
            in_a_thread(function)
            torch.empty(7)
        assert (m.peak, m.net) == ((4028, 4000) if held else (0, -4000))
        assert sum(nbytes for _, nbytes in m.events) == m.net
    with memory.measure("cpu") as m:
        held.append(torch.empty(1000))
        in_a_thread(held.clear)
    assert (m.peak, m.net) == (4000, 0)


def test_a_build_that_cannot_count_other_threads_says_so(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    _all_threads_flag.cache_clear()
    with pytest.warns(RuntimeWarning, match="this thread and autograd's alone"), memory.measure("cpu") as m:
        torch.empty(7)
    monkeypatch.undo()
    _all_threads_flag.cache_clear()
    assert m.peak == 28


def log_of(*changes):
    """The profiler's events of (ns, bytes, address, device), with the total after each on the CPU."""
    total, events = 5000, []
    for time, nbytes, address, *device in changes:
        total += nbytes * (not device)
        fields = SimpleNamespace(device=torch.device(*device or ["cpu"]), alloc_size=nbytes, ptr=address,
                                 total_allocated=total)
        events.append(SimpleNamespace(tag=_EventType.Allocation, start_time_ns=time, extra_fields=fields, children=()))
    return events


def test_a_release_counts_if_its_address_was_given_out_here():
    first, last = [(0, 1, 0xF), (0.5, -1, 0xF)], [(8, 1, 0xF), (9, -1, 0xF)]
    tree = log_of(*first, (1, -100, 0xB), (2, -8, 0xA), (2.5, 70, 0xC, "cuda"), (3, 50, 0xB), (4, -50, 0xB),
                  (5, -50, 0xB), (6, -60, 0xB), *last)
    tree = [SimpleNamespace(tag=_EventType.TorchOp, children=tree[3:6]), *tree[6:], *tree[:3]]
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


def test_what_pytorch_writes_to_stderr_is_as_it_was_afterwards(capfd):
    older = torch.zeros(2**20)
    before = _log_level(0)
    try:
        with memory.measure("cpu"):
            del older  # of which PyTorch warns
        assert _log_level(0) == 0 and capfd.readouterr().err == ""
    finally:
        _log_level(before)


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
