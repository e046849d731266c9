"""Exercises of the page *Quantised ZeRO*."""

import torch

from refimpl.zero.quantized import BlockCodec
from refimpl.zero.quantized.gather import QuantizedGather
from refimpl.zero.quantized.reduce import ReduceGroups, reduce_scatter

from . import exercise, launch, readable

HINTS = {
    "first": [
        "A shard has n = numel / N numbers. Its payload is n codes and n / 256 scales.",
        "A code of 8 bits is a byte; two codes of 4 bits are a byte. A scale has 4 bytes whatever the bits are.",
        "An `all_gather` and an `all_to_all` of shards both send N - 1 payloads from each rank. A step has two "
        "gathers, for forward and backward, and one reduction."],
    "second": [
        "Scale: `s = blocks.abs().amax(1, keepdim=True) / 127` of `blocks = g.view(-1, 256)`. Codes: "
        "`(blocks / s).round().to(torch.int8)`.",
        "Chunk r of g is for rank r. Its payload is its scales and its codes as `torch.uint8`, joined by `torch.cat`; "
        "`comm.all_to_all` of all payloads, one after the other, gives this rank N payloads of its own shard.",
        "Decode each payload to fp32, codes times scale, add them up, and divide by N."]}

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
    for case in ((2**14, 2, 8), (2**16, 4, 8), (2**16, 4, 4), (3 * 2**13, 3, 4)):
        said, read = predict(*case), launch(_sent, case[1], case[0], case[2], device="cpu")[0]
        if said != read:
            numel, N, bits = case
            return (f"{numel:,} numbers, {N} ranks, {bits} bits: you say {said:,}, a rank sends {read:,} bytes, three "
                    f"times {N - 1} payload{'s' * (N > 2)} of {numel // N:,} numbers")
    return None


def _gradient(rank, numel):
    g = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    g[:: 5 * BLOCK] *= 300  # some blocks have a number that is much larger than all others
    return g


def _reduced(comm, reduce, n):
    g = _gradient(comm.rank, comm.world_size * n)
    found = reduce(comm, g.clone())
    return found if readable(found) else None, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def second(reduce):
    """Grade `reduce(comm, g)`, which returns this rank's shard of the mean of all ranks' g (N·n,), in fp32, and sends
    int8 in blocks of 256, each with its scale; n is a multiple of 256."""
    for N, n in ((2, 16 * BLOCK), (4, 16 * BLOCK), (3, 7 * BLOCK)):
        gradients = [_gradient(rank, N * n) for rank in range(N)]
        mean = sum(gradients) / N
        steps = sum(g.view(-1, BLOCK).abs().amax(1) / 127 for g in gradients) / N
        most = (N - 1) * (n + 4 * n // BLOCK)
        for rank, (found, sent) in enumerate(launch(_reduced, N, reduce, n, device="cpu")):
            where = f"rank {rank} of {N}"
            if found is None or found.shape != (n,) or found.dtype != torch.float32:
                return f"{where}: expected this rank's shard, a tensor in fp32 of shape ({n},), which can be read"
            own = slice(rank * n, (rank + 1) * n)
            worst = ((found - mean[own]).view(-1, BLOCK).abs().amax(1) / steps.chunk(N)[rank]).max().item()
            if not worst <= 0.5005:
                return (f"{where}: a number is {worst:.3f} steps of its block away from the mean, where rounding to "
                        "the nearest allows 0.5: has each block its own scale, max / 127, and is the sum in fp32?")
            if sent > most + 32 * (N - 1):  # parts of a payload may be aligned
                return f"{where}: the numbers are right, but it sent {sent:,} bytes; in int8 it is {most:,}"
    return None
