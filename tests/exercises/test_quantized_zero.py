"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import quantized_zero as page
from refimpl.papers import quantized_zero as paper
from refimpl.zero.quantized import BlockCodec

# --- first -----------------------------------------------------------------------------------------------------------


def predict(numel, world_size, bits):
    n = numel // world_size
    payload = n * bits // 8 + 4 * (n // 256)
    return 3 * (world_size - 1) * payload  # two gathers, one reduction


def by_codec(numel, world_size, bits):
    return 3 * (world_size - 1) * BlockCodec(bits).payload_bytes(numel // world_size)


def by_blocks(numel, world_size, bits):
    sent, blocks = 0, numel / world_size / 256
    for _collective in ("gather in forward", "gather in backward", "reduce"):
        sent += (world_size - 1) * blocks * (256 * bits / 8 + 4)
    return sent


def with_fault(numel, world_size, bits, *, times=3, scale=4, shard=True, sent=lambda n: n - 1, code=None):
    n = numel // world_size if shard else numel
    return times * sent(world_size) * (n * (code or bits) // 8 + scale * n // 256)


# --- second ----------------------------------------------------------------------------------------------------------


def reduce(comm, g):
    N = comm.world_size
    blocks = g.view(N, -1, 256)  # for each rank, its blocks
    scales = blocks.abs().amax(2, keepdim=True) / 127
    codes = (blocks / scales).round().to(torch.int8)
    payloads = torch.cat([scales.view(N, -1).view(torch.uint8), codes.view(N, -1).view(torch.uint8)], 1)

    received = comm.all_to_all(payloads.view(-1)).view(N, -1)
    cut = 4 * blocks.shape[1]  # bytes of a payload's scales
    scales, codes = received[:, :cut].contiguous().view(torch.float32), received[:, cut:].view(torch.int8)
    numbers = codes.view(N, -1, 256) * scales[:, :, None]
    return numbers.mean(0).view(-1)


def in_two_exchanges(comm, g):
    blocks = g.view(-1, 256)
    scales = torch.linalg.vector_norm(blocks, torch.inf, 1) / 127
    codes = (blocks / scales[:, None] + 0.5).floor().clamp(-127, 127).to(torch.int8)
    scales, codes = comm.all_to_all(scales), comm.all_to_all(codes.view(-1))
    total = 0
    for s, q in zip(scales.chunk(comm.world_size), codes.chunk(comm.world_size), strict=True):
        total = total + (q.view(-1, 256).float() * s[:, None]).view(-1)
    return total / comm.world_size


def by_codec_of_library(comm, g):
    codec, N = BlockCodec(), comm.world_size
    n = len(g) // N
    payloads = torch.zeros(N, codec.payload_bytes(n), dtype=torch.uint8)
    codec.encode(g.view(N, n), payloads)
    out = torch.empty(1, n)
    codec.decode(comm.all_to_all(payloads.view(-1)).view(1, N, -1), out)
    return out[0]


def reduce_with_fault(comm, g, *, block=256, limit=127, rounded=torch.round, scale=torch.float32, code=torch.int8,
                      largest=torch.Tensor.abs, total=lambda numbers: numbers.mean(0), scaled=lambda s: s):
    N = comm.world_size
    block = block or len(g) // N
    blocks = g.view(N, -1, block)
    s = (largest(blocks).amax(2, keepdim=True) / limit).to(scale)
    codes = rounded(blocks / s.float()).clamp(-128, 127).to(code)
    scales = comm.all_to_all(s.view(-1))
    received = comm.all_to_all(codes.view(-1)).view(N, -1, block).float()
    return total(received * scaled(scales.float().view(N, -1, 1))).view(-1)


def one_scale(comm, g):
    """A scale for all of g, which all ranks share."""
    s = g.abs().max() / 127
    scales = comm.all_gather(s[None])
    codes = comm.all_to_all((g / s).round().to(torch.int8)).view(comm.world_size, -1)
    return (codes * scales[:, None]).mean(0)


def summed_in_int8(comm, g):
    """Codes of one common scale for a block, added up by a reduce_scatter."""
    blocks = g.view(-1, 256)
    s = comm.all_reduce(blocks.abs().amax(1), "max") / 127
    codes = (blocks / s[:, None]).round().to(torch.int8).view(-1)
    return (comm.reduce_scatter(codes).view(-1, 256) * s.chunk(comm.world_size)[comm.rank][:, None]
            ).view(-1) / comm.world_size


def rounded_twice(comm, g):
    mean = reduce(comm, g).view(-1, 256)
    s = mean.abs().amax(1, keepdim=True) / 127
    return ((mean / s).round() * s).view(-1)


def gathered(comm, g):
    """The right numbers, all of which go to all ranks."""
    payloads = comm.all_gather(paper.encode(g)).view(comm.world_size, -1)
    return torch.stack([paper.decode(each) for each in payloads]).mean(0).chunk(comm.world_size)[comm.rank].clone()


def of_the_next_rank(comm, g):
    return reduce(comm, g.view(comm.world_size, -1).roll(1, 0).reshape(-1))


def own_chunk(comm, g):
    """What this rank has of its shard, and no other's."""
    return g.chunk(comm.world_size)[comm.rank].clone()


def that_drop_the_shard(comm, g):
    shard = reduce(comm, g)
    shard.untyped_storage().resize_(0)
    return shard


ANSWERS = {
    page.first: Answers(
        right=[predict, by_codec, by_blocks],
        wrong=[
            (partial(with_fault, scale=0), "2 ranks, 8 bits: you say 24,576, a rank sends 24,960"),
            (partial(with_fault, scale=2), "2 ranks, 8 bits: you say 24,768, a rank sends 24,960"),
            (partial(with_fault, times=2), "you say 16,640, a rank sends 24,960 bytes, three times 1 payload of 8,192"),
            (partial(with_fault, shard=False), "you say 49,920, a rank sends 24,960"),
            (partial(with_fault, sent=lambda n: n), "you say 49,920, a rank sends 24,960"),
            (partial(with_fault, sent=lambda n: 1), "4 ranks, 8 bits: you say 49,920, a rank sends 149,760"),
            (partial(with_fault, code=8), "4 ranks, 4 bits: you say 149,760, a rank sends 76,032"),
            (lambda numel, n, bits: with_fault(numel, n, 8) * bits // 8, "4 ranks, 4 bits: you say 74,880"),
            (lambda numel, n, bits: 3 * (n - 1) * numel // n * 4, "2 ranks, 8 bits: you say 98,304"),
            (lambda numel, n, bits: predict(2**16, 4, bits), "16,384 numbers, 2 ranks, 8 bits")],
    ),
    page.second: Answers(
        right=[reduce, in_two_exchanges, by_codec_of_library, paper.reduce,
               partial(reduce_with_fault, scale=torch.bfloat16)],
        wrong=[
            (one_scale, "rank 0 of 2: a number is 75.737 steps of its block away"),
            (partial(reduce_with_fault, block=None), "has each block its own scale"),
            (partial(reduce_with_fault, block=512), "has each block its own scale"),
            (partial(reduce_with_fault, rounded=torch.trunc), "from the mean, where rounding to the nearest allows"),
            (partial(reduce_with_fault, rounded=torch.floor), "where rounding to the nearest allows 0.5"),
            (partial(reduce_with_fault, limit=128), "has each block its own scale, max / 127"),
            (partial(reduce_with_fault, limit=7), "has each block its own scale, max / 127"),
            (partial(reduce_with_fault, largest=lambda x: x), "has each block its own scale, max / 127"),
            (partial(reduce_with_fault, total=lambda numbers: numbers.sum(0)), "steps of its block away"),
            (partial(reduce_with_fault, total=lambda numbers: numbers.bfloat16().mean(0).float()), "the sum in fp32?"),
            (partial(reduce_with_fault, scaled=lambda s: s[:1]), "has each block its own scale"),
            (summed_in_int8, "is the sum in fp32?"),
            (rounded_twice, "steps of its block away"),
            (of_the_next_rank, "rank 0 of 2: a number is"),
            (own_chunk, "rank 0 of 2: a number is"),
            (lambda comm, g: g, "rank 0 of 2: expected this rank's shard, a tensor in fp32 of shape (4096,)"),
            (lambda comm, g: reduce(comm, g).view(-1, 256), "expected this rank's shard, a tensor in fp32 of shape"),
            (lambda comm, g: reduce(comm, g).bfloat16(), "expected this rank's shard, a tensor in fp32 of shape"),
            (that_drop_the_shard, "which can be read"),
            (partial(reduce_with_fault, block=128), "numbers are right, but it sent 4,224 bytes; in int8 it is 4,160"),
            (partial(reduce_with_fault, code=torch.int16), "the numbers are right, but it sent 8,256 bytes"),
            (gathered, "rank 0 of 2: the numbers are right, but it sent 8,320 bytes; in int8 it is 4,160")],
        saves_nothing=(lambda comm, g: comm.reduce_scatter(g, "avg"), "right, but it sent 16,384 bytes; in int8 it is"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
