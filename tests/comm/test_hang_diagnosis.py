"""What orders tell when ranks hang, when gloo aborts one, and when one returns too early."""

import concurrent.futures
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import failure, on_ranks

from refimpl.comm import CollectiveMismatch, RankError, launch
from refimpl.comm.collective_order import PAGE, Order
from refimpl.comm.hang_diagnosis import deserted, last_collectives, mismatch, orders, pages, waits
from refimpl.ranks.signs import RECORD

WORLD, ROW = (5, "ranks 0, 1 and 2"), (6, "ranks 0 and 2")


def record(*communicators):
    """A rank's record: of each communicator (key, ranks), what was begun, and whether the last of it is waited for."""
    written = bytearray(RECORD)
    for page, (name, labels, waiting) in zip(pages(written), communicators, strict=False):
        order = Order(page).name(*name)
        for label in labels:
            number = order.begin("all_gather", (2,), torch.float32, None, None, label)
        if waiting:
            order.wait(number)
    return bytes(written)


def test_a_record_has_a_page_for_each_communicator():
    assert len(pages(bytearray(RECORD))) == RECORD // PAGE == 14
    read = orders(record((WORLD, "ab", False), (ROW, "a", True)))
    assert {key: (order.ranks, order.count, order.waiting) for key, order in read.items()} == {
        5: ("ranks 0, 1 and 2", 2, 0), 6: ("ranks 0 and 2", 1, 1)}
    assert orders(bytes(RECORD)) == {}


def test_ranks_that_began_different_collectives_are_told_of_and_ranks_that_are_late_are_not():
    late = [record((WORLD, "abc", True)), record((WORLD, "a", False)), bytes(RECORD)]
    assert mismatch(late) is None and mismatch([bytes(RECORD)]) is None
    error = mismatch([*late[:2], record((WORLD, "abX", True))])
    assert error.ranks == (2,) and str(error).startswith("rank 2 began other collectives than rank 0, from #3 on:")
    of_row = [record((WORLD, "a", False), (ROW, "a", True)), record((WORLD, "a", True)),
              record((WORLD, "a", False), (ROW, "b", True))]
    assert str(mismatch(of_row)).startswith("in the group of ranks 0 and 2: rank 2 began other collectives than rank 0")


def test_who_waits_for_one_that_has_returned():
    waits, done, other = record((WORLD, "abc", True)), record((WORLD, "ab", False)), record((WORLD, "abc", False))
    error = deserted([waits, done, waits], [1])
    assert error.ranks == (1,) and str(error).startswith(
        "rank 1 returned after 2 collectives; ranks 0 and 2 wait for it in all_gather of c, (2,) float32 (#3)\n")
    assert deserted([waits, done, done], [1, 2]).ranks == (1, 2)
    assert "ranks 1 and 2 returned after 2 collectives; rank 0 waits for them" in str(
        deserted([waits, done, done], [1, 2]))
    for records, returned in (([waits, done, waits], []), ([waits, other, waits], [1]), ([other, done, other], [1]),
                              ([waits, bytes(RECORD), waits], [1])):  # it runs; has begun it; nobody waits; no member
        assert deserted(records, returned) is None


def test_where_ranks_wait():
    records = [record((WORLD, "ab", True)), record((WORLD, "a", False)), record((WORLD, "a", False), (ROW, "c", True))]
    assert waits(records) == {0: "all_gather of b, (2,) float32 (#2)",
                              2: "all_gather of c, (2,) float32 (#1) of the group of ranks 0 and 2"}


def test_the_last_collectives_of_one_rank():
    told = last_collectives(record((WORLD, "abcdef", True), (ROW, "", False)))
    assert told.splitlines() == ["the last collectives that this rank began with ranks 0, 1 and 2 (6 in all):",
                                 *[f"  #{n} all_gather of {'abcdef'[n - 1]}, (2,) float32" for n in range(3, 7)],
                                 "  it waited in #6"]


def test_a_text_that_is_being_written_is_none_of_the_64():
    page = bytearray(PAGE)
    order = Order(page).name(*WORLD)
    for number in range(1, 201):
        before = bytes(page)
        order.begin("all_gather", (number,), torch.float32)
        written = bytearray(page)
        written[:16] = before[:16]  # the text is there, the count is not
        assert Order(written).recent == Order(before).recent and len(order.recent) == min(number, 64)


@on_ranks(2, launch=launch)
def test_more_communicators_than_pages_have_orders_nobody_else_reads(comm):
    n = RECORD // PAGE + 3
    groups = [comm.split([0, 1]) for _ in range(n)]
    assert [group.all_reduce(torch.ones(1)).item() for group in groups] == [2.0] * n
    assert (groups[-1].order.count, comm.order.count) == (1, n)


# --- of real ranks ---------------------------------------------------------------------------------------------------


def trained(comm, last):
    """Two collectives on which all agree, and one on which rank 2 does not."""
    comm.all_reduce(torch.ones(8), label="gradients")
    comm.all_gather(torch.ones(2), label="blocks.0")
    last(comm)
    time.sleep(1000)


def other_sizes(comm):
    comm.all_gather(torch.ones(3 if comm.rank == 2 else 2), label="blocks.1")


def other_sizes_in_a_group(comm):
    row = comm.split([0, 2] if comm.rank != 1 else [1])
    row.all_gather(torch.ones(4 + comm.rank), label="blocks.1")


def other_collectives(comm):
    """Which wait for each other for ever."""
    x = torch.ones(3)
    comm.broadcast(x, 2, label="blocks.1") if comm.rank == 2 else comm.all_gather(x[:1], label="blocks.1")
    comm.barrier()


def other_order(comm):
    """Equal sizes, and sums that do not belong together; then a rank sleeps."""
    for label in ("a", "b")[::-1 if comm.rank == 2 else 1]:
        comm.all_reduce(torch.ones(4), label=label)


def a_handle_that_fails(comm):
    """An exception of torch.distributed, as of a connection that is lost."""
    other_order(comm)
    if comm.rank == 0:
        exec(compile("raise RuntimeError('Connection closed')", dist.distributed_c10d.__file__, "exec"))


BEGAN = {other_sizes: ("#3 all_gather of blocks.1, (2,) float32", "#3 all_gather of blocks.1, (3,) float32"),
         other_collectives: ("#3 all_gather of blocks.1, (1,) float32", "#3 broadcast of blocks.1, (3,) float32"),
         other_order: ("#3 all_reduce of a, (4,) float32", "#3 all_reduce of b, (4,) float32"),
         a_handle_that_fails: ("#4 all_reduce of b, (4,) float32", "#4 all_reduce of a, (4,) float32")}


@pytest.mark.parametrize("last", BEGAN, ids=lambda fn: fn.__name__)
def test_both_orders_are_told_and_the_rank_that_differs(last):
    error = failure("", trained, 4, last, error=CollectiveMismatch, timeout=1)
    told = str(error)
    assert error.ranks == (2,) and told.startswith(
        "rank 2 began other collectives than ranks 0, 1 and 3, from #3 on:\n  before that:\n"
        "    #1 all_reduce of gradients, (8,) float32, op sum\n    #2 all_gather of blocks.0")
    ours, theirs = (told.index(line) for line in BEGAN[last])
    assert told.index("ranks 0, 1 and 3:\n") < ours < told.index("  rank 2:\n") < theirs
    ended = {other_sizes: "was killed by SIGABRT", a_handle_that_fails: "raised RuntimeError: Connection closed"}
    assert ended.get(last, "did not go on") in told


def test_of_a_sub_group_too():
    assert failure("in the group of ranks 0 and 2: rank 2 began other", trained, 3, other_sizes_in_a_group,
                   error=CollectiveMismatch, timeout=2).ranks == (2,)


def test_ranks_that_wait_in_different_groups_are_told_where():
    def fn(comm):
        row = comm.split([0, 1])
        (row if comm.rank == 1 else comm).all_reduce(torch.ones(2), label="x")

    told = str(failure("rank 1 began other collectives than ranks 0 and 2", fn, 3, error=CollectiveMismatch,
                       timeout=60))  # at once: all wait, each for one that waits
    waits = " waited for others in all_reduce of x, (2,) float32, op sum "
    assert f"ranks 0 and 2{waits}(#2)\n" in told and f"rank 1{waits}(#1) of the group of ranks 0 and 1\n" in told


def test_a_rank_that_is_killed_or_raises_is_blamed_as_before_though_orders_differ():
    def fn(comm):
        other_order(comm)
        if comm.rank == 1:
            raise ValueError("mine")
        comm.barrier()

    error = failure("^rank 1 raised ValueError: mine", fn, 3)
    assert error.ranks == (1,) and type(error) is RankError


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def waiting_in_the_background(comm):
    a, b = comm.split([0, 1]), comm.split([0, 1])
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        if comm.rank == 0:
            thread.submit(a.all_reduce, torch.ones(3))
            spin(3)
        b.all_reduce(torch.ones(3))
        if comm.rank == 1:
            a.all_reduce(torch.ones(3))


def going_on_after_a_failure(comm):
    group = comm.split([0, 1])
    if comm.rank == 0:
        with pytest.raises(MemoryError), mock.patch("torch.distributed.all_reduce", side_effect=MemoryError):
            group.all_reduce(torch.ones(3))
        spin(3)
    comm.barrier()


@pytest.mark.parametrize("fn", [waiting_in_the_background, going_on_after_a_failure])
def test_ranks_that_go_on_are_no_deadlock(fn):
    assert launch(fn, 2, timeout=60) == [None, None]
