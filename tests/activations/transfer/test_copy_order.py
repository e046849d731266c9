"""Copies out and in: their order, how many at a time, when memory is let go, and each storage once."""

import gc
import threading
import weakref
from unittest.mock import patch

import pytest
import torch

from refimpl.activations.saved_tensors import PackedView
from refimpl.activations.transfer.copy_order import TransferSchedule


class Case:
    """`n` storages sent by a TransferSchedule of `depth`, each saved `views` times; `.flats` are weak references to the
    device's storages."""

    def __init__(self, lazy, depth, n=6, views=1):
        self.lazy, self.schedule = lazy, TransferSchedule(lazy, depth)
        self.views, self.flats, self.values = [], [], []
        for i in range(n):
            flat = torch.full((10,), float(i))
            self.flats.append(weakref.ref(flat.untyped_storage()))
            self.values.append(flat.clone())
            stored = self.schedule.send(flat, flat)
            self.views.append([PackedView(stored, flat) for _ in range(views)])

    @property
    def alive(self):
        """Which storages still have their device memory."""
        return [i for i, flat in enumerate(self.flats) if flat() is not None]

    def backward(self, order=None, drop=True):
        """Unpack in reverse order (or `order`), inside one backward; autograd drops what it has used."""
        order = range(len(self.views) - 1, -1, -1) if order is None else order
        in_backward(lambda: [self.use(i, drop) for i in order])

    def use(self, i, drop):
        for view in self.views[i]:
            assert torch.equal(view.unpack(), self.values[i])
        if drop:
            self.views[i] = []

    def fetched(self):
        """How many copies are on the device, besides the one in use."""
        return sum(stored.copy is not None for views in self.views for stored in {view.stored for view in views})


def in_backward(function):
    """Call it in the midst of a backward."""
    def hook(gradient):
        function()
    x = torch.zeros((), requires_grad=True) * 1
    x.register_hook(hook)
    x.backward()


@pytest.fixture
def case(lazy):
    return Case(lazy, depth=2)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_at_most_depth_storages_are_on_their_way_out(lazy, depth):
    case = Case(lazy, depth)
    assert case.alive == list(range(6 - depth, 6))
    assert lazy.waits == [("out", i) for i in range(6 - depth)], "each is waited for before it is let go"
    case.schedule.wait()
    assert case.alive == [] and lazy.numbers("out") == list(range(6))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_they_come_back_in_reverse_order_once_each(lazy, depth):
    Case(lazy, depth).backward()
    assert lazy.numbers("in") == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_depth_of_them_are_fetched_ahead(lazy, depth):
    """When storage i is handed over, i − 1 … i − depth are on their way, and no others; of the first one, the loss's,
    none."""
    case = Case(lazy, depth)
    case.schedule.wait()
    begun, seen = len(lazy.log), []
    def use(i):
        assert torch.equal(case.views[i][0].unpack(), case.values[i])
        seen.append([number for _, number in lazy.log[begun:]])
    in_backward(lambda: [use(i) for i in (5, 4, 3)])
    assert seen[:2] == [[5], list(range(5, max(3 - depth, -1), -1))]
    ins = [number for which, number in lazy.waits if which == "in"]
    assert ins[:3] == [5, 4, 3], "what is used is waited for; what is fetched ahead is not"


def test_device_memory_goes_when_all_who_saved_it_have_had_it(lazy):
    case = Case(lazy, depth=1, n=2, views=2)
    stored, copies = case.views[1][0].stored, []
    def use():
        first = case.views[1][0].unpack()
        copies.append(weakref.ref(first.untyped_storage()))
        assert stored.copy is not None, "another one is going to ask: no second copy over the bus"
        second = case.views[1][1].unpack()
        assert second.data_ptr() == first.data_ptr() and stored.copy is None
        del first, second
        copies.append(copies[0]() is None)
    in_backward(use)
    assert copies[1] is True and lazy.numbers("in") == [1], "1 for both, and nothing ahead of the first"


def test_nothing_stays_on_the_device_after_a_backward(lazy, case):
    """One that used a part of the graph: what was fetched ahead of it goes, and is waited for before."""
    case.backward(order=[5, 4], drop=False)
    assert case.fetched() == 0 and {number for which, number in lazy.waits if which == "in"} == {5, 4, 3, 2}
    case.backward(order=[3, 2, 1, 0], drop=False)
    assert case.fetched() == 0


def test_a_backward_that_raised_leaves_nothing_for_the_next(lazy, case):
    def fails():
        case.use(5, False)
        raise ValueError("no more")
    with pytest.raises(ValueError, match="no more"):
        in_backward(fails)
    begun = len(lazy.numbers("in"))
    case.backward(drop=False)
    assert case.fetched() == 0 and lazy.numbers("in")[begun:] == [5, 4, 3, 2, 1, 0], "from the beginning"


def test_a_retained_graph_comes_again(lazy, case):
    for _ in range(2):
        case.backward(drop=False)
        assert case.fetched() == 0
    assert lazy.numbers("in") == 2 * [5, 4, 3, 2, 1, 0]


def test_an_order_that_is_not_reversed_is_right_and_fetches_nothing_twice(lazy, case):
    case.backward(order=[3, 5, 4, 0, 2, 1], drop=False)
    assert sorted(lazy.numbers("in")) == list(range(6)) and case.fetched() == 0


def test_outside_a_backward_nothing_is_kept(case):
    """Somebody looks at `loss.grad_fn._saved_…`."""
    assert torch.equal(case.views[4][0].unpack(), case.values[4]) and case.fetched() == 0
    case.backward()


def test_what_is_not_needed_any_more_is_not_fetched(lazy, case):
    case.views[4] = []
    gc.collect()
    case.backward(order=[5, 3, 2, 1, 0])
    assert lazy.numbers("in") == [5, 3, 2, 1, 0]


def test_a_region_of_many_steps_does_not_grow(case):
    case.backward()
    assert case.schedule._order == []
    flat = torch.ones(10)
    assert case.schedule.send(flat, flat).index == 0


def test_host_memory_goes_with_the_graph(lazy, case):
    hosts = [weakref.ref(views[0].stored.host) for views in case.views]
    case.schedule.wait()
    lazy._queue.clear()
    case.views.clear()
    assert not any(host() is not None for host in hosts)


def test_what_was_written_to_on_its_way_out_is_refused(lazy):
    schedule, flat = TransferSchedule(lazy, 2), torch.zeros(10)
    view = PackedView(schedule.send(flat, flat), flat)
    flat.add_(1)
    schedule.wait()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation while it was copied to the host: float32 "
                                           r"\[10\] is at version 1, expected version 0"):
        view.unpack()
    flat = torch.zeros(10)
    view = PackedView(schedule.send(flat, flat), flat)
    flat.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        view.unpack()  # inside the region, before anybody has settled
    late = torch.zeros(10)
    view = PackedView(schedule.send(late, late), late)
    schedule.wait()
    late.add_(1)
    assert torch.equal(view.unpack(), torch.zeros(10)), "the copy was made by then"


def test_a_wait_that_was_interrupted_is_made_again(lazy):
    """Until then the device's memory is not given away."""
    schedule, flat = TransferSchedule(lazy, 2), torch.ones(10)
    alive, view = weakref.ref(flat.untyped_storage()), PackedView(schedule.send(flat, flat), flat)
    lazy._queue[0] = lazy._queue[0][0], torch.ones(10)  # the schedule alone holds the source
    del flat
    with patch.object(lazy, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        schedule.wait()
    assert alive() is not None
    assert torch.equal(view.unpack(), torch.ones(10)) and alive() is None


def test_the_end_of_a_backward_waits_for_another_threads_take(lazy):
    """It drops what was fetched: not between the fetch and the use."""
    case, entered, go = Case(lazy, depth=1, n=1), threading.Event(), threading.Event()
    fetch, wait, ended = lazy.to_device, lazy.wait, []
    def slow(host, device):
        entered.set()
        go.wait(0.2)
        return fetch(host, device)
    lazy.to_device = slow
    case.schedule.wait()
    other = threading.Thread(target=lambda: (entered.wait(), case.schedule.forget(), ended.append(go.is_set())))
    other.start()
    def waits(ticket):
        go.set()
        other.join(0.2)  # it cannot end before we do
        wait(ticket)
    lazy.wait = waits
    assert torch.equal(case.views[0][0].unpack(), case.values[0])
    other.join()
    assert ended == [True]


@pytest.mark.parametrize("skipped", ["out", "in"], ids=["no wait before letting go", "no wait before use"])
def test_a_schedule_that_does_not_wait_is_seen(lazy, skipped):
    """The mutants: device memory is given away, or used, before its copy is there."""
    case, wait = Case(lazy, depth=1), lazy.wait
    lazy.wait = lambda ticket: None if lazy.log[ticket][0] == skipped else wait(ticket)
    if skipped == "out":
        lazy._queue.clear()
    with pytest.raises((AssertionError, IndexError) if skipped == "out" else AssertionError):
        case.backward()
