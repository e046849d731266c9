"""Exercises of the page *Quantised ZeRO*."""

import torch

from refimpl.zero.quantized import BlockCodec
from refimpl.zero.quantized.gather import QuantizedGather
from refimpl.zero.quantized.reduce import ReduceGroups, reduce_scatter

from . import exercise, launch

BLOCK, NUMEL = 256, 4096  # of the second exercise: numbers with a scale, and of a shard


def _sent(comm, numel, bits):
    """Return the bytes that a rank sends: a bucket of `numel` numbers is gathered twice and reduced."""
    codec, n = BlockCodec(bits, BLOCK), numel // comm.world_size
    for _ in range(2):
        QuantizedGather(comm, codec).launch(torch.ones(n), torch.empty(numel)).wait()
    reduce_scatter(ReduceGroups(comm, comm), codec, torch.ones(numel), n, torch.float32).wait()
    return comm.traffic.total


@exercise("bytes", int, process="call")
def first(predict):
    """Grade `predict(numel, world_size, bits)`, which returns the bytes that a rank sends for a bucket of `numel`
    numbers in a step of ZeRO-3 with both codecs: blocks of 256, each with a scale of 4 bytes."""
    for case in ((2**14, 2, 8), (2**16, 4, 8), (2**16, 4, 4)):
        said, read = predict(*case), launch(_sent, case[1], case[0], case[2], device="cpu")[0]
        if said != read:
            numel, world_size, bits = case
            return f"{numel:,} numbers, {world_size} ranks, {bits} bits: you say {said:,}, a rank sends {read:,}"
    return None


def _gradient(rank, numel):
    g = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    g[:: 5 * BLOCK] *= 300  # some blocks have a number that is much larger than all others
    return g


def _reduced(comm, reduce):
    g = _gradient(comm.rank, comm.world_size * NUMEL)
    found = reduce(comm, g.clone())
    return found, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def second(reduce):
    """Grade `reduce(comm, g)`, which returns this rank's shard of the mean of all ranks' g (N·n,), and sends int8 in
    blocks of 256; n is a multiple of 256."""
    for N in (2, 4):
        gradients = [_gradient(rank, N * NUMEL) for rank in range(N)]
        mean = sum(gradients) / N
        steps = [g.view(-1, BLOCK).abs().amax(1, keepdim=True) / 127 for g in gradients]
        allowed = (sum(steps) / N / 2 * 1.001).expand(-1, BLOCK).reshape(-1)
        most = (N - 1) * (NUMEL + 4 * NUMEL // BLOCK)
        for rank, (found, sent) in enumerate(launch(_reduced, N, reduce, device="cpu")):
            part = slice(rank * NUMEL, (rank + 1) * NUMEL)
            if not isinstance(found, torch.Tensor) or found.shape != (NUMEL,):
                return f"expected this rank's shard, a tensor of shape ({NUMEL},)"
            worst = ((found - mean[part]).abs() / allowed[part]).max().item()
            if not worst <= 1:
                return (f"rank {rank} of {N}: a number is {worst:.1f} times as far from the mean as half a step "
                        "of its block: has each block its own scale, and is the sum in fp32?")
            if sent > most + 64 * N:
                return f"the numbers are right, but a rank sent {sent:,} bytes; in int8 it is {most:,}"
    return None
