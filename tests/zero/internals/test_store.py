"""Shards that are stored elsewhere: the same parameters to the bit, fewer bytes here; when an engine asks for which."""

import contextlib
import functools
import weakref

import pytest
import torch
from rank_pool import on_ranks
from zero_bodies import tried_again
from zero_kit import BUCKET, ENGINES, Elsewhere, equal, gradients_of_step, parameters_of, token_batches, train_gpt
from zero_steps import gpt_engine, stack

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes
from refimpl.zero.internals.store import StoredUpdate
from refimpl.zero.update import ShardedUpdate

STAGES = ENGINES[1:]


class Forgetful(Elsewhere):
    """The mutant: says that it took the shards, and keeps them here."""
    def put(self, key, tensors, changed=True):
        self.asked.append(("put", key))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_the_same_parameters_wherever_shards_are_stored(comm, dtype):
    for make in STAGES:
        found = []
        for stored in (False, True):
            engine = gpt_engine(make, comm, dtype, steps=3, store=Elsewhere() if stored else None)
            again = gpt_engine(make, comm, dtype, store=Elsewhere() if stored else None)
            again.load_state_dict(engine.state_dict())
            for each in (engine, again):
                train_gpt(each, 1)
                found.append(parameters_of(each))
        assert all(equal(found[0], ours) for ours in found[1:])


def held(make, store, dtype):
    """(ledger between two steps, peak of a step): bytes here."""
    engine = gpt_engine(make, FakeCommunicator(0, 4), dtype, store=store)
    for step in range(3):
        with memory.track(engine.model, engine.optimizer, *engine.parameters.shards.values()) as t:
            x = token_batches(3)[step, 0, :2]
            engine.backward(engine.forward(x, x))
            engine.step()
    return engine, t.now, t.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", STAGES)
@pytest.mark.parametrize("store", [Elsewhere, Forgetful])
def test_bytes_of_states_are_not_here_between_steps(make, store, dtype):
    engine, now, peak = held(make, store(), dtype)
    states = model_state_bytes(engine.model, 4, engine.stage, bucket_bytes=BUCKET)
    gone = now["optimizer state"] < 0.01 * states["optimizer state"]  # Adam's step counters stay
    shards_gone = now["parameters"] < 0.01 * states["parameters"]
    assert gone == (store is Elsewhere) and (engine.stage < 3 or shards_gone == (store is Elsewhere))
    _, _, here = held(make, None, dtype)
    assert (here.total - peak.total > 0.5 * states["optimizer state"]) == (store is Elsewhere)


def test_the_next_bucket_is_prefetched():
    engine, *_ = held(Zero2, store := Elsewhere(), torch.float32)
    store.asked.clear()
    gradients_of_step(engine)
    last, kinds = len(engine.buckets) - 1, ("states", "gradients")
    assert store.asked == [("put", ("gradients", i)) for i in range(last + 1)]  # as soon as they are reduced
    store.asked.clear()
    engine.step()
    expected = []
    for i in range(last + 1):
        expected += [("get", (kind, i)) for kind in kinds]
        expected += [("prefetch", (kind, i + 1)) for kind in kinds if i < last]
        expected += [("drop", ("gradients", i)), ("put", ("states", i))]
    assert store.asked == expected


class Noting(Elsewhere):
    """Notes what was put of parameters' shards, and whether it was changed."""
    def put(self, key, tensors, changed=True):
        super().put(key, tensors, changed)
        self.asked[-1] = ("put", key, changed)


def test_shards_that_were_only_gathered_are_put_as_unchanged_and_the_next_is_prefetched():
    engine, *_ = held(Zero3, store := Noting(), torch.float32)
    store.asked.clear()
    engine.gathering.look_ahead = 0
    gradients_of_step(engine)
    assert {asked[2] for asked in store.asked if asked[0] == "put" and asked[1][0] == "parameters"} == {False}
    assert any(asked[0] == "prefetch" for asked in store.asked)
    engine.step()
    puts = [asked for asked in store.asked if asked[0] == "put"]
    assert all(changed for _, _, changed in puts[-2 * len(engine.buckets):])
    assert all(tensor.dim() for kept in store.tensors.values() for tensor in kept)  # step counters are read on the host


def test_an_update_that_raises_leaves_shards_where_they_are_stored():
    engine, *_ = held(Zero3, store := Elsewhere(), torch.float32)
    gradients_of_step(engine)
    with contextlib.suppress(ZeroDivisionError), engine.optimizer.register_step_pre_hook(lambda *_: 1 / 0):
        engine.step()
    assert all(tensor.untyped_storage().nbytes() == 0 for kept in store.tensors.values() for tensor in kept)
    assert len(store.tensors) == 3 * len(engine.buckets)  # states, gradients and parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_an_update_on_the_host_with_a_store_or_without(comm, dtype):
    """With and without a store, each update ends where the stage's own does, and saves the same."""
    how = {"steps": 2, "micro_batches": 2}
    for make in STAGES:
        own = gpt_engine(make, comm, dtype, **how)
        for kind, store in ((ShardedUpdate, None), (ShardedUpdate, Elsewhere()), (StoredUpdate, Elsewhere())):
            other = gpt_engine(make, comm, dtype, store=store, update=functools.partial(kind, device="cpu"), **how)
            assert equal(parameters_of(own), parameters_of(other)), (make, kind, store)
            other.load_state_dict(own.state_dict())
            assert equal(parameters_of(own), parameters_of(other)), (make, kind, store)


def test_an_update_of_shards_is_refused_where_there_are_none():
    with pytest.raises(TypeError, match="DataParallel has no shards to update; use Zero1"):
        gpt_engine(0, FakeCommunicator(0, 2), update=ShardedUpdate)


@pytest.mark.parametrize("make", STAGES)
@on_ranks(2)
def test_gradients_of_several_reductions_add_up_wherever_they_are_stored(comm, make):
    """Steps of two backwards, both of which reduce, a skipped one between them."""
    found = []
    for store in (None, Elsewhere()):
        engine = gpt_engine(make, comm, store=store)
        for step, micro_batches in enumerate(token_batches(4, 2)):
            for tokens in micro_batches:
                gradients_of_step(engine, tokens[None])
            engine.skip_step() if step == 2 else engine.step()
        found.append(parameters_of(engine))
    assert equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ENGINES)
@on_ranks(2)
def test_a_step_that_raised_can_be_tried_again(comm, make, dtype):
    """Its optimizer raises in the second bucket."""
    for how in ({}, *([{"store": Elsewhere()}] if make in STAGES else [])):
        engines = gpt_engine(make, comm, dtype), gpt_engine(make, comm, dtype, **how)
        assert tried_again(*engines, number=2 if make in STAGES else 1)


def test_gradients_are_gone_after_a_step_and_add_nothing_to_the_next():
    """With a store, which has forgotten them."""
    found, x = [], torch.ones(1, 16)
    for store in (None, Elsewhere()):
        engine = Zero2(stack(2, 16), FakeCommunicator(0, 1), bucket_bytes=1, store=store)
        for _ in range(2):
            engine.backward(engine(x).sum())
            gradients = [weakref.ref(shard) for shard in engine.update.gradients.values()]
            engine.step()
            assert len(gradients) == 2 and not any(shard() is not None for shard in gradients)
        found.append(parameters_of(engine))
    assert equal(*found)
