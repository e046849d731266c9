"""What a rank has begun, in order: counted, hashed, told; and two orders told apart."""

import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks, pooled

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.comm.collective_order import KEPT, PAGE, Order, difference
from refimpl.common.spans import SpanRecorder

ROOT = Path(__file__).resolve().parents[2]
GATHER = ("all_gather", torch.Size([1024]), torch.float32, None, None, "blocks.3")
OTHERS = [("broadcast", *GATHER[1:]), (GATHER[0], torch.Size([1025]), *GATHER[2:]),
          (*GATHER[:2], torch.float64, *GATHER[3:]), (*GATHER[:3], "sum", None, "blocks.3"),
          (*GATHER[:4], 0, "blocks.3"), (*GATHER[:5], "blocks.4"), ("barrier",)]


def order_of(*collectives):
    order = Order()
    for each in collectives:
        order.begin(*each)
    return order


def test_one_digest_means_one_order():
    first, again = order_of(GATHER, *OTHERS), order_of(GATHER, *OTHERS)
    assert (first.count, first.digest, first.recent) == (again.count, again.digest, again.recent)
    digests = [order_of(each).digest for each in (GATHER, *OTHERS)]
    assert len(set(digests)) == len(digests) and all(0 < digest < 2**63 for digest in digests)
    assert torch.tensor(digests, dtype=torch.int64).tolist() == digests
    assert len({order_of(GATHER, OTHERS[0]).digest, order_of(OTHERS[0], GATHER).digest, order_of(GATHER).digest}) == 3


def test_it_is_told_as_a_reader_would_say_it():
    order = order_of(GATHER, ("all_reduce", (2, 3), torch.int64, "max"), ("broadcast", (), torch.bool, None, 2),
                     ("barrier",))
    assert order.recent == ["#1 all_gather of blocks.3, (1024,) float32", "#2 all_reduce of (2, 3) int64, op max",
                            "#3 broadcast of () bool, from rank 2", "#4 barrier"]


def test_the_last_64_are_kept_and_all_are_in_the_digest():
    long, other = order_of(*[GATHER] * 100), order_of(OTHERS[0], *[GATHER] * 99)
    assert long.count == 100 and [line.split()[0] for line in long.recent] == [f"#{n}" for n in range(37, 101)]
    assert len(long.recent) == KEPT and long.recent == other.recent and long.digest != other.digest


def test_a_long_label_is_cut_and_another_one_with_the_same_beginning_is_not_the_same():
    orders = [order_of(("all_gather", (1,), torch.float32, None, None, "é" * 200 + end)) for end in "ab"]
    assert orders[0].digest != orders[1].digest and orders[0].recent != orders[1].recent
    assert all(order.recent[0].startswith("#1 all_gather of ééé") for order in orders)


def test_another_process_hashes_alike():
    code = "from refimpl.comm.collective_order import Order; order = Order(); order.begin('all_gather', (3,), " \
           "'float32', None, None, 'x'); print(order.digest)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}).stdout
    assert int(told) == order_of(("all_gather", (3,), "float32", None, None, "x")).digest


def test_whoever_reads_its_page_knows_as_much():
    page = bytearray(PAGE)
    order = Order(page).name(7, "ranks 0 and 1")
    for each in (GATHER, *OTHERS):
        order.begin(*each)
    order.wait(3)
    read = Order(bytes(page))
    assert (read.count, read.digest, read.recent) == (order.count, order.digest, order.recent)
    assert (read.key, read.ranks, read.waiting, read.ended) == (7, "ranks 0 and 1", 3, 0)
    order.end()
    assert (Order(page).waiting, Order(page).ended) == (0, 1)


@pytest.mark.alone
def test_it_costs_less_than_the_smallest_operation_of_torch():
    order, x = Order(), torch.ones(1)
    def one_collective():
        order.wait(order.begin(*GATHER))
        order.end()
    ours, torchs = (min(timeit.repeat(each, number=100, repeat=50)) for each in (one_collective, lambda: x.add_(1)))
    assert ours < torchs


# --- of communicators ------------------------------------------------------------------------------------------------


def everything(comm):
    x = torch.ones(2 * comm.world_size)
    comm.all_reduce(x, label="sum of x")
    comm.reduce_scatter(x, "max", async_op=True, label="x").wait()
    comm.all_gather(x[:1], label="first")
    comm.all_to_all(x, label="columns")
    comm.broadcast(x, 1, label="bias")
    comm.all_reduce(x.long())
    comm.barrier()
    comm.send_recv(x, (comm.rank + 1) % comm.world_size, x, (comm.rank - 1) % comm.world_size)  # in no order
    row = comm.split([0, 1] if comm.rank < 2 else [2, 3])
    row.all_gather(x, label="row")
    before, host = comm.traffic, comm.host()
    host.all_gather(torch.zeros(1))
    assert comm.host() is host and host.device.type == "cpu" and host.ranks == comm.ranks
    assert comm.traffic - before == host.traffic == {"all_gather": 4 * (comm.world_size - 1)}
    return comm.order.recent, comm.order.digest, row.order.recent, host.order.recent


ORDER = ["#1 all_reduce of sum of x, (8,) float32, op sum", "#2 reduce_scatter of x, (8,) float32, op max",
         "#3 all_gather of first, (1,) float32", "#4 all_to_all of columns, (8,) float32",
         "#5 broadcast of bias, (8,) float32, from rank 1", "#6 all_reduce of (8,) int64, op sum", "#7 barrier",
         "#8 split"]


@pytest.mark.parametrize("debug", [False, True])
def test_every_collective_is_in_the_order_of_its_communicator_and_a_fake_one_agrees(debug):
    answers = pooled(everything, 4, debug=debug) + [everything(FakeCommunicator(1, 4))]
    for recent, digest, row, host in answers:
        assert recent == ORDER and digest == answers[0][1]
        assert row == ["#1 all_gather of row, (8,) float32"] and host == ["#1 all_gather of (1,) float32"]


def out_of_step(comm):
    """Ranks that begin different collectives, and the rest of them when all have met on the host."""
    mine = [comm.all_reduce, comm.all_gather][::1 - 2 * comm.rank]
    first = mine[0](torch.ones(4), async_op=True)
    digests = comm.host().all_gather(torch.tensor([comm.order.digest])).tolist()
    met = comm.host().split([0, 1]).all_reduce(torch.tensor(comm.rank)).item()
    comm.host().barrier()
    return digests, met, comm.order.recent, first is not None


def test_ranks_meet_on_the_host_though_their_collectives_are_out_of_step():
    (digests, met, ours, _), (same, _, theirs, _) = launch(out_of_step, 2, timeout=20)
    assert digests == same and digests[0] != digests[1] and met == 1
    assert (ours, theirs) == (["#1 all_reduce of (4,) float32, op sum"], ["#1 all_gather of (4,) float32"])


@on_ranks(3)
def test_sub_groups_have_hosts_too(comm):
    """Of groups that overlap, of ranks that have made different numbers of groups."""
    for ranks in ([0, 1], [1, 2], [0, 1, 2]):
        group = comm.split(ranks)
        assert (group is not None) == (comm.rank in ranks)
        if group is not None:
            assert group.host().all_gather(torch.tensor(comm.rank)).tolist() == ranks
    assert comm.host().all_gather(torch.tensor(comm.rank)).tolist() == [0, 1, 2]


def test_a_label_names_the_span():
    comm = FakeCommunicator(0, 2)
    with SpanRecorder() as recorder:
        comm.all_reduce(torch.ones(2), label="mine")
        comm.all_reduce(torch.ones(2))
    assert [span.name for span in recorder.recording.spans] == ["mine", ""]


def test_a_dry_run_records_what_a_run_would():
    real, dry = FakeCommunicator(0, 2), FakeCommunicator(0, 2)
    real.all_gather(torch.ones(3, 4), label="x")
    memory.dry_run(lambda: dry.all_gather(torch.ones(3, 4), label="x"))
    assert real.order.digest == dry.order.digest and dry.order.count == 1


# --- two orders ------------------------------------------------------------------------------------------------------


def lines(*texts, first=1):
    return [f"#{number} {text}" for number, text in enumerate(texts, first)]


def test_equal_orders_do_not_differ():
    assert difference({}) == difference({0: lines("a", "b"), 1: lines("a", "b")}) == ("", [])
    assert difference({0: [], 1: []}) == ("", [])


def test_both_orders_are_told_from_the_first_difference_on_after_a_little_of_what_they_share():
    text, ranks = difference({0: lines(*"abcdefghijk"), 2: lines(*"abcdX"), 1: lines(*"abcdefghijk")})
    assert ranks == [2]
    assert text.splitlines() == [
        "rank 2 began other collectives than ranks 0 and 1, from #5 on:", "  before that:", "    #3 c", "    #4 d",
        "  ranks 0 and 1:", "    #5 e", "    #6 f", "    #7 g", "    #8 h", "    … until #11", "  rank 2:", "    #5 X",
        "    nothing more"]


def test_who_began_less_differs_and_without_a_majority_the_lowest_rank_is_right():
    text, ranks = difference({1: lines(*"ab"), 0: lines(*"abc")})
    assert ranks == [1] and text.endswith("  rank 0:\n    #3 c\n    nothing more\n  rank 1:\n    nothing after #2")
    text, ranks = difference({0: [], 1: lines("a"), 2: lines("a")})
    assert ranks == [0] and text.endswith("  rank 0:\n    nothing\n  ranks 1 and 2:\n    #1 a\n    nothing more")
    assert difference({0: lines("a"), 1: lines("b"), 2: lines("c"), 3: lines("a")})[1] == [1, 2]


def test_a_difference_older_than_what_is_kept():
    text, ranks = difference({0: lines(*"abc", first=40), 1: lines(*"xbc", first=40), 2: lines(*"abc", first=40)})
    assert ranks == [1] and "from #40 on, or before: older ones are not kept:" in text
    text, ranks = difference({0: lines(*"abc", first=40), 1: lines(*"xbc", first=4), 2: lines(*"abc", first=40)})
    assert ranks == [1] and text.endswith("  rank 1:\n    nothing after #6")


def test_to_have_begun_fewer_is_no_contradiction():
    orders = {0: [], 1: lines(*"abcd"), 2: lines(*"ab"), 3: lines(*"abc")}
    assert difference(orders, missing=False) == ("", []) and difference(orders)[1] == [0]
    text, ranks = difference({**orders, 4: lines(*"abX")}, missing=False)
    assert ranks == [4] and text.startswith("rank 4 began other collectives than ranks 1 and 3, from #3 on:")
    assert difference({0: lines(*"abc", first=40), 1: []}, missing=False) == ("", [])
