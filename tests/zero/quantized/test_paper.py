"""The idea in one screen beside the hardened version: the same numbers to the bit, and the same bytes."""

import torch
from one_screen import check_paper

from refimpl.comm import launch
from refimpl.comm.two_level import levels
from refimpl.papers import quantized_zero as paper
from refimpl.zero.quantized import BlockCodec
from refimpl.zero.quantized.gather import QuantizedGather
from refimpl.zero.quantized.reduce import ReduceGroups, reduce_scatter

n, CODEC = 16 * 256, BlockCodec()  # sizes that need no padding


def test_it_is_one_screen():
    check_paper("zero/quantized", "quantized_zero")


def beside(comm):
    """Of each collective: whether numbers are equal, and bytes by the paper and by ours."""
    intra, inter = levels(comm, 2)
    shard, g, whole, found = torch.randn(n), torch.randn(4 * n), torch.empty(4 * n), []
    for ours, theirs in (
            (lambda: QuantizedGather(comm, CODEC).launch(shard, whole).wait(), lambda: paper.gather(comm, shard)),
            (lambda: reduce_scatter(ReduceGroups(comm, comm), CODEC, g, n, g.dtype).wait(),
             lambda: paper.reduce(comm, g)),
            (lambda: reduce_scatter(ReduceGroups(comm, intra, inter), CODEC, g, n, g.dtype).wait(),
             lambda: paper.reduce_on_two_levels(intra, inter, g))):
        before = comm.traffic.total
        mine, between = ours(), comm.traffic.total
        found.append((torch.equal(mine, theirs()), between - before, comm.traffic.total - between))
    return found


def test_numbers_and_bytes():
    for found in launch(beside, 4):
        for equal, ours, theirs in found:
            assert equal and ours == theirs
        assert found[0][1] == found[1][1] == 3 * n * 260 // 256
