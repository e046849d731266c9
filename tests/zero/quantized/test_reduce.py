"""Reductions by themselves: parts of any size, means that all ranks agree on, bytes in flight of the closed form."""

import torch
from zero_kit import SGD
from zero_steps import stack, tracked

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch, simulate
from refimpl.comm.two_level import levels
from refimpl.zero import Zero3
from refimpl.zero.quantized import BlockCodec, QuantizedReduce, reduce
from refimpl.zero.quantized.closed_forms import gather_bytes, mean_traffic, reduce_bytes, reduce_traffic
from refimpl.zero.quantized.codec import SLICE
from refimpl.zero.quantized.gather import QuantizedGather
from refimpl.zero.quantized.reduce import ReduceGroups, all_reduce, reduce_scatter

CODEC = BlockCodec()


def gradients(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def of_any_size(comm, dtype, sizes=(0, 1, 5, 64, 100, 3001)):
    """Errors of the mean on all ranks, relative to the largest number, and whether the bytes are those predicted."""
    (intra, inter), found = levels(comm, 2), []
    for numel in sizes:
        for seed, ranks in ((0, ReduceGroups(comm, comm)), (4, ReduceGroups(comm, intra, inter))):
            mean = sum(gradients(seed + rank, numel).to(dtype).float() for rank in range(4)) / 4
            mine, before = gradients(seed + comm.rank, numel).to(dtype), comm.traffic
            result = all_reduce(ranks, CODEC, mine, mine).begin().wait()
            assert result is mine
            if ranks.inter is None:
                assert comm.traffic - before == mean_traffic(CODEC, numel, 4)
            found.append((result, ((result.float() - mean).abs().max() / 4).item() if numel else 0.0))
    return found


def assert_the_mean(answers, bound):
    for found in answers:
        for (result, error), (theirs, _) in zip(found, answers[0], strict=True):
            assert torch.equal(result, theirs) and error < bound


def test_parts_of_any_size():
    for dtype, bound in ((torch.float32, 0.008), (torch.bfloat16, 0.012)):
        assert_the_mean(launch(of_any_size, 4, dtype), bound)


def test_parts_of_any_size_on_ranks_that_are_threads():
    assert_the_mean(simulate(of_any_size, 4, torch.float32, (1, 100)), 0.008)


def test_bytes_of_a_payload_that_no_number_fills_are_not_read(monkeypatch):
    """The last parts are shorter than the others: what memory held before must not come into their scales."""
    found, original = [], reduce._payloads
    for byte in (0, 113):
        monkeypatch.setattr(reduce, "_payloads", lambda *how, byte=byte: original(*how).fill_(byte))
        found.append([result for answers in simulate(of_any_size, 4, torch.float32, (1, 5, 65, 3001))
                      for result, _ in answers])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_part_of_the_bytes_goes_between_machines():
    def sent_by_level(comm):
        intra, inter = levels(comm, 2)
        reduce_scatter(ReduceGroups(comm, intra, inter), CODEC, torch.ones(4 * 300), 300, torch.float32).wait()
        return {"intra": intra.traffic.total, "inter": inter.traffic.total}
    for sent in launch(sent_by_level, 4):
        assert sent == reduce_traffic(CODEC, 300, 4, 2) and sent["inter"] == CODEC.payload_bytes(300)


def test_bytes_in_flight():
    """What is there besides is a slice in fp32, or two where payloads are added up: 8 bytes of each number, and scales.
    """
    N, n, comm = 4, 3 * SLICE, FakeCommunicator(0, 4)
    shard, whole, flat = torch.ones(n), torch.empty(N * n), torch.ones(N * n)
    whole.untyped_storage().resize_(0)
    with memory.track(shard, whole) as t:
        handle = QuantizedGather(comm, CODEC).launch(shard, whole)
        flying = t.now.total - t.start.total
        whole.untyped_storage().resize_(4 * N * n)
        handle.wait()
        after = t.now.total - t.start.total
    assert flying == gather_bytes(CODEC, n, N) < 4 * N * n / 3.9 and after == 4 * N * n
    most = t.peak.total - t.start.total
    assert 0 <= most - flying - 4 * N * n <= 9 * SLICE
    for ranks in (ReduceGroups(comm, comm), ReduceGroups(comm, comm.split([0, 1]), comm.split([0, 2]))):
        with memory.track(flat) as t:
            handle = reduce_scatter(ranks, CODEC, flat, n, torch.float32)
            encoded = t.now.total - t.start.total
            handle.begin()
            flying = t.now.total - t.start.total
            result = handle.wait()
            after = t.now.total - t.start.total
        predicted = reduce_bytes(CODEC, n, N, ranks.intra.world_size)
        assert 2 * encoded == flying == predicted["in flight"] < 4 * N * n / 1.9 and after == result.nbytes
        peak = t.peak.total - t.start.total
        assert 0 <= peak - max(predicted.values()) <= 9 * SLICE


class Hoarding(QuantizedReduce):
    """The mutant: whole gradients stay while payloads travel."""

    encodes = False


def in_flight(hook, weights):
    engine = Zero3(stack(6, 512), FakeCommunicator(0, 4), SGD, hook=hook, quantized_weights=weights)
    t = tracked(engine, torch.ones(2, 512))
    return (t.peak.total - t.start.total) / (4 * 512 * 512)  # in units of a layer


def test_a_step_has_less_in_flight_than_without_codecs():
    plain, ours, hoarding = in_flight(None, None), in_flight(QuantizedReduce(), CODEC), in_flight(Hoarding(), CODEC)
    print(f"above shards at the peak, in layers: {plain:.3f}, with codecs {ours:.3f}")
    assert ours < plain - 0.7 and hoarding > ours + 0.4, (plain, ours, hoarding)


def test_between_replicas_shards_are_averaged_and_encoded():
    def averaged(comm):
        x, before = gradients(comm.rank, 100), comm.traffic
        x = QuantizedReduce(CODEC).between(comm).all_reduce(x, "avg", out=x, async_op=True, label="").wait()
        return x, comm.traffic - before
    mean = (gradients(0, 100) + gradients(1, 100)) / 2
    for x, sent in simulate(averaged, 2):
        assert (x - mean).abs().max() < 0.03 and sent == mean_traffic(CODEC, 100, 2)
