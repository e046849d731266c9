"""Quantised collectives in one screen: parameters and gradients travel as blocks of int8, each with a scale.

    s = max |x| / 127      q = round(x / s)      x̂ = s · q      |x − x̂| ≤ s / 2        for each block of b numbers

so a number takes 1 + 4/b bytes on the wire in place of 4. Of Ψ numbers each of N ranks has n = Ψ/N:

    qwZ   gather     encode my shard, all_gather, decode all         (N−1) · (1 + 4/b) · n bytes   for   (N−1) · 4n
    qgZ   reduce     encode N chunks, all_to_all, decode, add up     (N−1) · (1 + 4/b) · n bytes   for   (N−1) · 4n

A ring that adds up at each hop would round N − 1 times; all_to_all rounds once. Between R machines of S ranks it goes
on two levels: rank t of a machine first gets all chunks that the ranks t of any machine need, adds up, encodes the
sums, and sends each to its machine. So only (R−1)/N · (1 + 4/b) · Ψ bytes go between machines; a number is rounded
twice.

What a rank keeps stays exact: the optimizer updates fp32 shards, and the rounding of one step is not there in the next.
"ZeRO++" (Wang et al. 2023), sections 3.1 and 3.3. It has the gradients in 4 bits; a step of 16-bit parameters then
sends M/2 bytes for each of two gathers and M/4 between machines, with M bytes for each of them before.
"""

import torch

BLOCK = 256


def encode(x):
    """Return x (n,), n a multiple of b, as bytes: (n + 4 n/b,)."""
    blocks = x.view(-1, BLOCK)  # (n/b, b)
    s = blocks.abs().amax(1, keepdim=True) / 127  # (n/b, 1)
    q = (blocks / s.clamp(min=1e-38)).round().to(torch.int8)
    return torch.cat([s.flatten().view(torch.uint8), q.flatten().view(torch.uint8)])


def decode(payload):
    """Return the numbers of a payload, (n,)."""
    s = payload[: 4 * (len(payload) // (BLOCK + 4))]
    q = payload[len(s) :].view(torch.int8).view(-1, BLOCK)
    return (q * s.clone().view(torch.float32)[:, None]).flatten()


def decoded_sum(payloads):
    """Return the sum of payloads (R, bytes) in fp32, in their order."""
    return sum(decode(payload) for payload in payloads)


def gather(comm, shard):
    """Return every rank's shard (n,), decoded: (N·n,). `comm`: of refimpl.comm, or the ring of `collectives`."""
    payloads = comm.all_gather(encode(shard)).view(comm.world_size, -1)
    return torch.cat([decode(payload) for payload in payloads])


def reduce(comm, g):
    """Return this rank's chunk of the mean of all g (N·n,): (n,)."""
    N = comm.world_size
    received = comm.all_to_all(torch.cat([encode(chunk) for chunk in g.chunk(N)]))
    return decoded_sum(received.view(N, -1)) / N


def reduce_on_two_levels(intra, inter, g):
    """The same on R machines of S ranks. Rank s of machine r is rank s of `intra`, r of `inter`, and s + S·r of all."""
    S, R = intra.world_size, inter.world_size
    payloads = torch.stack([encode(chunk) for chunk in g.chunk(S * R)])  # (R·S, bytes): machine by machine
    by_rank = payloads.view(R, S, -1).transpose(0, 1).reshape(-1)  # rank by rank: (S·R·bytes,)
    received = intra.all_to_all(by_rank).view(S, R, -1)
    means = torch.stack([decoded_sum(received[:, machine]) / S for machine in range(R)])  # (R, n)
    received = inter.all_to_all(torch.cat([encode(mean) for mean in means]))
    return decoded_sum(received.view(R, -1)) / R
