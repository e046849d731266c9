"""all_reduce from nothing but send and recv: how a ring computes it, and where 2(N−1)/N comes from."""

import torch

from .communicator import Communicator


def ring_all_reduce(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Return Σ over ranks of x, on every rank, as a new tensor of x's shape. x does not change.

    x is cut into N chunks (sizes differ by one element at most). Round one, N−1 steps: rank r sends a chunk to r+1,
    and adds the chunk that it receives from r−1 to its own. Each chunk travels once around and collects every rank's
    part, so that rank r ends with the sum of chunk r+1. Round two, N−1 steps: the sums travel around once more.

    Sent per rank: 2(N−1) of N chunks, 2(N−1)/N of x's bytes, whatever N is (Patarasuk & Yuan 2009; Gibiansky 2017,
    "Bringing HPC techniques to deep learning"). `ring_traffic("all_reduce", …)` has it to the byte.
    """
    N, r = comm.world_size, comm.rank
    following, preceding = (r + 1) % N, (r - 1) % N
    total = x.detach().clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(N)

    def pass_on(sent, expected):
        """Send one chunk to the next rank; return the one that came from the rank before."""
        return comm.send_recv(chunks[sent % N], following, chunks[expected % N], preceding)

    for step in range(N - 1):  # reduce-scatter
        chunks[(r - step - 1) % N].add_(pass_on(r - step, r - step - 1))
    for step in range(N - 1):  # all-gather
        chunks[(r - step) % N].copy_(pass_on(r + 1 - step, r - step))
    return total
