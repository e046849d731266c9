"""all_reduce along a tree: of any number of ranks, which are threads here."""

import itertools
import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from refimpl.comm import Link
from refimpl.comm.tree import tree_all_reduce, tree_seconds, tree_traffic


class Rank:
    """Sends and receives through queues; `boxes`: {(from, to): queue}. What does not come is missed after a while."""

    def __init__(self, rank, world_size, boxes):
        self.rank, self.world_size, self.boxes, self.sent = rank, world_size, boxes, 0

    def send(self, x, dst):
        assert 0 <= dst < self.world_size
        self.sent += x.nbytes
        self.boxes[self.rank, dst].put(x.clone())

    def recv(self, like, src, out=None):
        x = self.boxes[src, self.rank].get(timeout=2)
        return x if out is None else out.copy_(x)


def test_every_rank_has_the_sum_and_sends_what_is_predicted():
    for N in range(1, 10):
        boxes = {pair: queue.Queue() for pair in itertools.permutations(range(N), 2)}
        ranks, given = [Rank(rank, N, boxes) for rank in range(N)], [torch.tensor([1, 10**rank]) for rank in range(N)]
        with ThreadPoolExecutor(N) as pool:
            found = list(pool.map(tree_all_reduce, ranks, given))
        assert [each.tolist() for each in found] == [[N, int("1" * N)]] * N, N
        assert all(box.empty() for box in boxes.values())
        assert [rank.sent for rank in ranks] == [tree_traffic(16, N, rank) for rank in range(N)]
        assert sum(rank.sent for rank in ranks) == 2 * (N - 1) * 16  # each but the first: once up, once down


def test_the_traffic_of_each_rank():
    assert [tree_traffic(8, N) for N in (1, 2, 3, 4, 5, 8, 9)] == [0, 8, 16, 16, 24, 24, 32]
    assert [tree_traffic(8, 6, rank) for rank in range(6)] == [24, 8, 16, 8, 16, 8]


def test_so_many_messages_follow_one_upon_the_other():
    link = Link(bytes_per_second=1e9, latency=0.25)
    for N, messages in ((1, 0), (2, 2), (3, 4), (4, 4), (5, 6), (8, 6), (9, 8)):
        assert tree_seconds(0, N, link) == messages * 0.25, N
