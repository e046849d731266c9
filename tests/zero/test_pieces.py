"""An optimizer over what one rank's shards hold: in which groups, with which gradients, a bucket at a time."""

import functools

import pytest
import torch
from torch import nn

from refimpl.zero.bucket import buckets_of
from refimpl.zero.pieces import Pieces

SGD, ADAM = functools.partial(torch.optim.SGD, lr=1.0), functools.partial(torch.optim.Adam, lr=0.1)


def pieces_of(rank, world_size=2, dtype=None, optimizer=SGD, groups=None, sizes=(6, 8, 1), bucket_bytes=40):
    """(pieces, buckets, shards, named) of parameters that count from 0."""
    named = [(f"p{i}", nn.Parameter(torch.arange(float(n)).to(dtype))) for i, n in enumerate(sizes)]
    buckets, shards = buckets_of(named, world_size, bucket_bytes), {}
    for bucket in buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for view, slot in zip(bucket.views(flat), bucket.slots, strict=True):
            view.copy_(slot.parameter.detach())
        shards[bucket] = bucket.shard(flat, rank).clone()
    return Pieces(buckets, shards, rank, optimizer, groups, named), buckets, shards, named


def held(pieces):
    return {piece.slot.name: own.tolist() for pairs in pieces.of.values() for piece, own in pairs}


def test_all_ranks_together_hold_each_element_once():
    first, second = (held(pieces_of(rank)[0]) for rank in range(2))
    assert first == {"p2": [0], "p1": [0, 1, 2, 3], "p0": [0, 1, 2, 3]}
    assert second == {"p1": [4, 5, 6, 7], "p0": [4, 5]}


def test_a_piece_in_fp32_is_its_shard_and_one_in_16_bits_a_master():
    pieces, (bucket, *_), shards, _ = pieces_of(0)
    assert not pieces.masters and pieces.of[bucket][0][1].data_ptr() == shards[bucket].data_ptr()
    pieces, (bucket, *_), shards, _ = pieces_of(0, dtype=torch.bfloat16)
    (_, own), *_ = pieces.of[bucket]
    assert own.dtype == torch.float32 and own.data_ptr() == pieces.masters[bucket].data_ptr()
    pieces.masters[bucket] += 1 + 2**-12  # which bf16 cannot tell from 1
    pieces.round(bucket, shards)
    assert torch.equal(shards[bucket], pieces.masters[bucket].bfloat16())


def test_gradients_are_views_and_none_where_nobody_used_the_parameter():
    pieces, buckets, _, named = pieces_of(0, bucket_bytes=1000)
    (bucket,), used = buckets, {named[0][1], named[2][1]}
    shard = torch.arange(float(bucket.shard_numel))
    pieces.give(bucket, shard, used)
    gradients = {piece.slot.name: own.grad for piece, own in pieces.of[bucket]}
    assert gradients["p1"] is None and gradients["p2"].data_ptr() == shard.data_ptr()
    shard.zero_()
    assert gradients["p2"].sum() == 0


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_one_bucket(gradient_dtype):
    pieces, buckets, shards, named = pieces_of(0, dtype=torch.bfloat16, optimizer=ADAM)
    for bucket in buckets:
        pieces.give(bucket, torch.ones(bucket.shard_numel, dtype=gradient_dtype), {p for _, p in named})
    first, *others = buckets
    before = {bucket: shards[bucket].clone() for bucket in buckets}
    groups = [list(group["params"]) for group in pieces.optimizer.param_groups]
    pieces.step(first, shards)
    assert not torch.equal(shards[first], before[first]) and all(own.grad is None for _, own in pieces.of[first])
    for bucket in others:
        assert torch.equal(shards[bucket], before[bucket])
        assert all(own.grad.dtype == gradient_dtype for _, own in pieces.of[bucket])
    assert set(pieces.optimizer.state) == {own for _, own in pieces.of[first]}
    assert [[id(p) for p in group["params"]] for group in pieces.optimizer.param_groups] == [
        [id(p) for p in group] for group in groups]


def test_an_optimizer_that_raises_has_all_its_parameters_again():
    pieces, (bucket, *_), shards, named = pieces_of(0)
    count = len(pieces.optimizer.param_groups[0]["params"])
    pieces.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pieces.step(bucket, shards)
    assert len(pieces.optimizer.param_groups[0]["params"]) == count


class Counting(torch.optim.SGD):
    """How many parameters it looks at."""

    looks = 0

    def step(self):
        Counting.looks += sum(len(group["params"]) for group in self.param_groups)
        super().step()


def test_each_parameter_is_looked_at_once_in_all_buckets_together():
    pieces, buckets, shards, named = pieces_of(0, 1, optimizer=functools.partial(Counting, lr=1.0), sizes=(8,) * 50,
                                               bucket_bytes=32)
    Counting.looks = 0
    for bucket in buckets:
        pieces.step(bucket, shards)
    assert (len(buckets), Counting.looks) == (50, 50)


def two_groups(named):
    return [{"params": [named[2][1]], "lr": 0.5}, {"params": (p for _, p in named[:2])}]


def test_groups_are_the_callers_with_pieces_in_place_of_parameters():
    for rank, sizes in ((0, [1, 2]), (1, [0, 2])):
        pieces, *_ = pieces_of(rank, groups=two_groups)
        assert pieces.members == [["p2"], ["p0", "p1"]]  # also of those that this rank has nothing of
        assert [len(group["params"]) for group in pieces.optimizer.param_groups] == sizes
        assert [group["lr"] for group in pieces.optimizer.param_groups] == [0.5, 1.0]


def test_a_rank_without_a_piece_has_an_optimizer_all_the_same():
    pieces, (bucket,), shards, named = pieces_of(3, 4, sizes=(2,), optimizer=ADAM)
    assert pieces.of[bucket] == [] and pieces.members == [["p0"]]
    pieces.give(bucket, torch.ones(bucket.shard_numel), {p for _, p in named})
    pieces.step(bucket, shards)
    assert not pieces.optimizer.state and [p.numel() for p in pieces.optimizer.param_groups[0]["params"]] == [0]
