"""Ranks and a ring in one screen: N processes, and an all_reduce made of nothing but messages to the next rank.

Rank r sends to r+1 and receives from r−1. A tensor of B bytes is cut into N chunks of B/N.

    reduce_scatter   N−1 steps; in each, a sum of one chunk moves on, and each rank adds its own part to it. The sum of
                     chunk c begins at rank c+1, passes all, and ends at rank c:             sends (N−1)/N · B
    all_gather       N−1 steps; in each, one whole chunk moves on, until every rank has all:   sends (N−1)/N · B
    all_reduce       the two, one after the other:                                           sends 2(N−1)/N · B

So what a rank sends is nearly 2B however many ranks there are, and no algorithm sends less. "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (Patarasuk & Yuan 2009), theorem 1.
"""

import multiprocessing
import pickle
import tempfile

import torch
import torch.distributed as dist


def launch(fn, world_size, *args):
    """Run `fn(ring, *args)` in `world_size` processes, the ranks; return what each returned, in the order of ranks.

    Each rank is a fork, a copy of this process, so `fn` may be defined anywhere. They find each other by a file.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [context.Process(target=run, args=(fn, rank, world_size, f"file://{folder}/meet", sending, args),
                                 daemon=True) for rank, (_, sending) in enumerate(pipes)]
        for rank in ranks:
            rank.start()
        answers = [pickle.loads(receiving.recv_bytes()) for receiving, _ in pipes]
        for rank in ranks:
            rank.join()
    return answers


def run(fn, rank, world_size, meeting, sending, args):
    """Connect one rank to the others with gloo, run `fn`, and send back what it returned."""
    torch.set_num_threads(1)  # a fork has none of the threads that torch started before it
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    sending.send_bytes(pickle.dumps(fn(Ring(rank, world_size), *args)))
    dist.barrier()  # one that leaves early would break the others' connections
    dist.destroy_process_group()


class Ring:
    """Run collectives as one rank of N = `world_size`; `sent` counts the bytes that it sends. N has to divide dim 0."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.sent = rank, world_size, 0

    def pass_on(self, chunk):
        """Send a chunk to the next rank; return the one that the rank before has sent."""
        N, r, received = self.world_size, self.rank, torch.empty_like(chunk)
        for message in dist.isend(chunk, (r + 1) % N), dist.irecv(received, (r - 1) % N):  # both are under way at once
            message.wait()
        self.sent += chunk.nbytes
        return received

    def reduce_scatter(self, x):
        """Return chunk r of the sum of all ranks' x: (N·n, …) -> (n, …)."""
        chunks = x.chunk(self.world_size)
        total = chunks[self.rank - 1].clone()  # the sum of chunk r−1 begins here
        for step in range(1, self.world_size):
            total = self.pass_on(total).add_(chunks[self.rank - 1 - step])  # of chunk r−1−step
        return total

    def all_gather(self, x, out=None):
        """Return the x of all ranks, one after the other: (n, …) -> (N·n, …)."""
        out = x.new_empty(self.world_size * len(x), *x.shape[1:]) if out is None else out
        chunks = out.chunk(self.world_size)
        chunks[self.rank].copy_(x)
        for step in range(self.world_size - 1):
            chunks[self.rank - 1 - step].copy_(self.pass_on(chunks[self.rank - step]))
        return out

    def all_reduce(self, x):
        """Return the sum of all ranks' x, in its shape."""
        return self.all_gather(self.reduce_scatter(x))
