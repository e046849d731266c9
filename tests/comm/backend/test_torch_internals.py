"""What hides torch's own work from trackers, and waits until torch has released what was lent to it."""

import inspect
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import patiently, within
from rank_pool import on_ranks

from refimpl import memory
from refimpl.comm import launch
from refimpl.comm.backend import torch_internals


def test_the_collectives_that_torch_renamed_are_those_of_this_version():
    names = {torch_internals.all_gather_single.__name__, torch_internals.reduce_scatter_single.__name__}
    assert names == ({"all_gather_single", "reduce_scatter_single"} if hasattr(dist, "all_gather_single")
                     else {"all_gather_into_tensor", "reduce_scatter_tensor"})


@pytest.mark.parametrize("function, names", [
    (dist.all_reduce, "tensor op group async_op"),
    (torch_internals.reduce_scatter_single, "output input op group async_op"),
    (torch_internals.all_gather_single, "output_tensor input_tensor group async_op"),
    (dist.all_to_all_single, "output input output_split_sizes input_split_sizes group async_op"),
    (dist.broadcast, "tensor src group async_op group_src")], ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_given_by_position_is_in_its_place_in_this_version(function, names):
    assert list(inspect.signature(function).parameters) == names.split()


def test_what_is_unseen_is_in_no_tracker():
    assert not torch_internals.watched()
    with memory.track() as t:
        assert torch_internals.watched()
        with torch_internals.unseen():
            hidden = torch.ones(1000)
        seen = torch.ones(10)
    assert t.peak.total == seen.nbytes and hidden.sum() == 1000


@patiently
def test_unwatched_tensors_are_lent_as_they_are_and_nobody_waits():
    x = torch.ones(3)
    lent, references = torch_internals.lend(x)
    assert lent[0] is x and references is None
    held, start = lent[0].detach(), time.monotonic()
    torch_internals.wait_for_release(lent, references)
    within(time.monotonic() - start, 0.5)
    assert held is not None


@patiently
def test_a_watched_tensor_is_waited_for_until_the_last_other_reference_is_gone():
    x = torch.ones(3)
    with memory.track():
        lent, references = torch_internals.lend(x)
        assert lent[0] is not x and lent[0].data_ptr() == x.data_ptr()
        torch_internals.wait_for_release(lent, references)  # nobody has it
        held = [lent[0].view(3)]
        timer = threading.Timer(0.1, held.clear)
        start = time.monotonic()
        timer.start()
        torch_internals.wait_for_release(lent, references)
        assert held == [] and 0.05 < time.monotonic() - start
        within(time.monotonic() - start, 1)
        timer.join()
        kept, start = lent[0].view(3), time.monotonic()
        torch_internals.wait_for_release(lent, references, seconds=0.1)  # not for ever
        assert 0.1 <= time.monotonic() - start and kept is not None
        within(time.monotonic() - start, 1)


@on_ranks(2, launch=launch, timeout=20)
def test_a_collective_can_be_asked_whether_it_is_done_under_a_tracker_and_a_profiler(comm):
    """Without `unrecorded` gloo's thread and the one that asks wait for each other, within some dozens."""
    with memory.track(), memory.measure("cpu"):
        for _ in range(60):
            handles = [comm.all_reduce(torch.ones(1000), async_op=True) for _ in range(4)]
            while not all(handle.done() for handle in handles):
                pass
    assert [handle.wait()[0].item() for handle in handles] == [2.0] * 4


def test_a_profiler_that_nobody_tracks_beside_sees_collectives_as_before():
    with torch.profiler.profile() as profile:
        assert torch_internals.unrecorded(torch.ones, 3).sum() == 3
    assert "aten::ones" in [event.name for event in profile.events()]
    with memory.track(), torch.profiler.profile() as profile:
        torch_internals.unrecorded(torch.ones, 3)
        torch.zeros(3)
    assert {"aten::ones", "aten::zeros"} & {event.name for event in profile.events()} == {"aten::zeros"}
