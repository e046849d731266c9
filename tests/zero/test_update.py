"""An optimizer over what one rank's shards hold: in which groups, with which gradients, a bucket at a time, where."""

import functools

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import SHARDED, Elsewhere, equal, parameters_of, train_gpt
from zero_steps import gpt_engine

from refimpl.zero.bucket import buckets_of
from refimpl.zero.internals.store import StoredUpdate
from refimpl.zero.update import ShardedUpdate

SGD, ADAM = functools.partial(torch.optim.SGD, lr=1.0), functools.partial(torch.optim.Adam, lr=0.1)


def make(rank, world_size=2, dtype=None, optimizer=SGD, groups=None, sizes=(6, 8, 1), bucket_bytes=40):
    """(ShardedUpdate, buckets, shards, named) of parameters that count from 0."""
    named = [(f"p{i}", nn.Parameter(torch.arange(float(n)).to(dtype))) for i, n in enumerate(sizes)]
    buckets, shards = buckets_of(named, world_size, bucket_bytes), {}
    for bucket in buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for view, slot in zip(bucket.views(flat), bucket.slots, strict=True):
            view.copy_(slot.parameter.detach())
        shards[bucket] = bucket.shard(flat, rank).clone()
    return ShardedUpdate(buckets, shards, rank, optimizer, groups, named), buckets, shards, named


def held(sharded):
    return {piece.slot.name: own.tolist() for pairs in sharded.pieces.values() for piece, own in pairs}


def gradients_of_ones(sharded, buckets, dtype=None):
    for bucket in buckets:
        sharded.add_gradients(bucket, torch.ones(bucket.shard_numel, dtype=dtype))


def test_all_ranks_together_hold_each_element_once():
    first, second = (held(make(rank)[0]) for rank in range(2))
    assert first == {"p2": [0], "p1": [0, 1, 2, 3], "p0": [0, 1, 2, 3]}
    assert second == {"p1": [4, 5, 6, 7], "p0": [4, 5]}


def test_a_piece_in_fp32_is_its_shard_and_one_in_16_bits_a_master():
    sharded, (bucket, *_), shards, _ = make(0)
    assert not sharded.masters and sharded.pieces[bucket][0][1].data_ptr() == shards[bucket].data_ptr()
    sharded, (bucket, *_), shards, _ = make(0, dtype=torch.bfloat16)
    (_, own), *_ = sharded.pieces[bucket]
    assert own.dtype == torch.float32 and own.data_ptr() == sharded.masters[bucket].data_ptr()
    sharded.masters[bucket] += 1 + 2**-12  # which bf16 cannot tell from 1
    sharded.round_master(bucket)
    assert torch.equal(shards[bucket], sharded.masters[bucket].bfloat16())


def nothing_follows(bucket):
    return None


def test_gradients_are_views_and_what_nobody_used_stays_as_it_is():
    sharded, buckets, shards, named = make(0, bucket_bytes=1000)
    (bucket,), used = buckets, {named[0][1], named[2][1]}
    shard, before = torch.arange(1.0, bucket.shard_numel + 1), held(sharded)
    sharded.add_gradients(bucket, shard)
    gradients = {piece.slot.name: own.grad for piece, own in sharded.pieces[bucket]}
    assert gradients["p2"].data_ptr() == shard.data_ptr()
    shard.fill_(2)
    assert gradients["p2"].sum() == 2 * gradients["p2"].numel()
    sharded.step(used, nothing_follows)
    after = held(sharded)
    assert [name for name in after if after[name] == before[name]] == ["p1"]


def test_gradients_of_micro_batches_add_up():
    sharded, (bucket, *_), _, _ = make(0)
    for _ in range(3):
        gradients_of_ones(sharded, [bucket])
    assert all((own.grad == 3).all() for _, own in sharded.pieces[bucket])


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_one_bucket(gradient_dtype):
    sharded, buckets, shards, named = make(0, dtype=torch.bfloat16, optimizer=ADAM)
    gradients_of_ones(sharded, buckets, gradient_dtype)
    first, *others = buckets
    before = {bucket: shards[bucket].clone() for bucket in buckets}
    groups = [list(map(id, group["params"])) for group in sharded.optimizer.param_groups]

    def stop(bucket):
        raise InterruptedError

    with pytest.raises(InterruptedError):  # after the first bucket
        sharded.step({p for _, p in named}, stop)
    assert not torch.equal(shards[first], before[first]) and all(own.grad is None for _, own in sharded.pieces[first])
    for bucket in others:
        assert torch.equal(shards[bucket], before[bucket])
        assert all(own.grad.dtype == gradient_dtype for _, own in sharded.pieces[bucket])
    assert set(sharded.optimizer.state) == {own for _, own in sharded.pieces[first]}
    assert [list(map(id, group["params"])) for group in sharded.optimizer.param_groups] == groups


def test_an_optimizer_that_raises_has_all_its_parameters_again():
    sharded, (bucket, *_), shards, named = make(0)
    count = len(sharded.optimizer.param_groups[0]["params"])
    sharded.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sharded.step(set(), nothing_follows)
    assert len(sharded.optimizer.param_groups[0]["params"]) == count


class Counting(torch.optim.SGD):
    """How many parameters it looks at."""

    looks = 0

    def step(self):
        Counting.looks += sum(len(group["params"]) for group in self.param_groups)
        super().step()


def test_each_parameter_is_looked_at_once_in_all_buckets_together():
    sharded, buckets, *_ = make(0, 1, optimizer=functools.partial(Counting, lr=1.0), sizes=(8,) * 50, bucket_bytes=32)
    Counting.looks = 0
    sharded.step(set(), nothing_follows)
    assert (len(buckets), Counting.looks) == (50, 50)


class CountingInGroups(torch.optim.SGD):
    """It counts steps in its param groups, where Adan and others do, and begins there with its first step."""
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for own in group["params"]:
                own.grad *= group["count"]
        super().step()


def test_steps_that_are_counted_in_groups_are_counted_once_whatever_the_number_of_buckets():
    sharded, buckets, shards, named = make(0, 1, optimizer=functools.partial(CountingInGroups, lr=1.0), bucket_bytes=32)
    assert len(buckets) > 1
    before = {bucket: shards[bucket].clone() for bucket in buckets}
    for _ in range(3):
        gradients_of_ones(sharded, buckets)
        sharded.step({p for _, p in named}, nothing_follows)
    group, = sharded.optimizer.param_groups
    assert group["count"] == 3 and len(group["params"]) == len(named)
    for bucket in buckets:
        for piece, own in sharded.pieces[bucket]:
            assert torch.equal(own.detach(), before[bucket][piece.place : piece.place + len(own)] - 6)


def two_groups(named):
    return [{"params": [named[2][1]], "lr": 0.5}, {"params": (p for _, p in named[:2])}]


def test_groups_are_the_callers_with_pieces_in_place_of_parameters():
    for rank, sizes in ((0, [1, 2]), (1, [0, 2])):
        sharded, *_ = make(rank, groups=two_groups)
        assert sharded.group_names == [["p2"], ["p0", "p1"]]  # also of those that this rank has nothing of
        assert [len(group["params"]) for group in sharded.optimizer.param_groups] == sizes
        assert [group["lr"] for group in sharded.optimizer.param_groups] == [0.5, 1.0]


def test_a_rank_without_a_piece_has_an_optimizer_all_the_same():
    sharded, (bucket,), shards, named = make(3, 4, sizes=(2,), optimizer=ADAM)
    assert sharded.pieces[bucket] == [] and sharded.group_names == [["p0"]]
    gradients_of_ones(sharded, [bucket])
    sharded.step({p for _, p in named}, nothing_follows)
    assert not sharded.optimizer.state and [p.numel() for p in sharded.optimizer.param_groups[0]["params"]] == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", SHARDED)
@on_ranks(2)
def test_an_update_elsewhere_gives_the_same_numbers(comm, make, dtype, tmp_path):
    """Three steps, clipped, updated where they are or on the "host"; and what each loads of what the other saved."""
    found, ways = [], ({}, {"update": functools.partial(ShardedUpdate, device="cpu")},
                       {"update": functools.partial(StoredUpdate, device="cpu"), "store": Elsewhere()})
    engines = [gpt_engine(make, comm, dtype, **options) for options in ways]
    for i, engine in enumerate(engines):
        train_gpt(engine, 3, max_norm=0.1)
        engine.save(tmp_path / str(i))
        found.append(parameters_of(engine))
    for i, engine in enumerate(engines):
        engine.load(tmp_path / str((i + 1) % 3))
        train_gpt(engine, 1)
        found.append(parameters_of(engine))
    assert all(equal(each, found[0]) for each in found[1:3]) and all(equal(each, found[3]) for each in found[4:])
    update = engines[1].update
    shards = {x.untyped_storage()._cdata for x in engines[1].parameters.shards.values()}
    assert all(own.untyped_storage()._cdata not in shards for pairs in update.pieces.values() for _, own in pairs)
    assert len(update.masters) == len(engines[1].buckets)
