"""all_reduce along a tree, from nothing but send and recv: few steps, and many bytes.

    up       in step i = 1, 2, 4, … rank r with r mod 2i = i sends its sum to r − i         ⌈log₂ N⌉ steps
    down     the sum goes the same way back

Rank 0 has the whole sum in between. Each step moves a whole tensor of B bytes: 2⌈log₂ N⌉ · (α + B/β) seconds on a link
of latency α and rate β, where a ring takes 2(N−1) · (α + B/(Nβ)). So a tree is for small tensors and many ranks.
Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH", section 4.5.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .communicator import Communicator


def tree_all_reduce(comm: "Communicator", x: torch.Tensor) -> torch.Tensor:
    """Return Σ over ranks of x, on every rank, as a new tensor of x's shape. x does not change."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    sizes = [1 << i for i in range((comm.world_size - 1).bit_length())]
    for size in sizes:
        if comm.rank % (2 * size) == size:
            comm.send(total, comm.rank - size)
        elif comm.rank % (2 * size) == 0 and comm.rank + size < comm.world_size:
            total.add_(comm.recv(total, comm.rank + size))
    for size in reversed(sizes):  # the way back: who sent last receives first
        if comm.rank % (2 * size) == size:
            comm.recv(total, comm.rank - size, out=total)
        elif comm.rank % (2 * size) == 0 and comm.rank + size < comm.world_size:
            comm.send(total, comm.rank + size)
    return total


def tree_traffic(nbytes, world_size, rank=0):
    """Return the bytes that `rank` sends: B once up, unless it is rank 0, and once down to each rank below it."""
    below = [size for size in (1 << i for i in range((world_size - 1).bit_length()))
             if rank % (2 * size) == 0 and rank + size < world_size]
    return nbytes * (len(below) + (rank > 0))


def tree_seconds(nbytes, world_size, link):
    """Return how long it takes over a `Link`: 2⌈log₂ N⌉ messages follow one upon the other."""
    return 2 * (world_size - 1).bit_length() * link.seconds("send", nbytes, world_size)
