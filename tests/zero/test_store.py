"""Shards that are stored elsewhere: the same parameters to the bit, fewer bytes here; when an engine asks for which."""

import contextlib
import functools
import itertools

import pytest
import torch
from zero_kit import BUCKET, ENGINES, Elsewhere, equal, gradients_of_step, parameters_of, token_batches, train_gpt
from zero_steps import gpt_engine

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import Zero1, Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes
from refimpl.zero.store import StoredUpdate
from refimpl.zero.update import ShardedUpdate

STAGES = (Zero1, Zero2, Zero3)


class Forgetful(Elsewhere):
    """The mutant: says that it took the shards, and keeps them here."""
    def put(self, key, tensors, changed=True):
        self.asked.append(("put", key))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_parameters_wherever_shards_are_stored(dtype):
    def trained(comm, dtype):
        found = {}
        for make, stored in itertools.product(STAGES, (False, True)):
            engine = gpt_engine(make, comm, dtype, steps=3, store=Elsewhere() if stored else None)
            again = gpt_engine(make, comm, dtype, store=Elsewhere() if stored else None)
            again.load_state_dict(engine.state_dict())
            for each in (engine, again):
                train_gpt(each, 1)
            found[make.__name__, stored] = parameters_of(engine), parameters_of(again)
        return found

    for answer in launch(trained, 2, dtype):
        for make in STAGES:
            expected, continued = answer[make.__name__, False]
            assert equal(expected, continued)
            assert all(equal(expected, ours) for ours in answer[make.__name__, True])


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
def test_an_update_on_the_host_with_a_store_or_without(dtype):
    def updated_on_the_host(comm, dtype):
        """Whether each update, with and without a store, ends where the stage's own does, and saves the same."""
        found, how = {}, {"steps": 2, "micro_batches": 2}
        for make in STAGES:
            own = gpt_engine(make, comm, dtype, **how)
            for kind, store in ((ShardedUpdate, None), (ShardedUpdate, Elsewhere()), (StoredUpdate, Elsewhere())):
                other = gpt_engine(make, comm, dtype, store=store, update=functools.partial(kind, device="cpu"), **how)
                alike = [equal(parameters_of(own), parameters_of(other))]
                other.load_state_dict(own.state_dict())
                alike.append(equal(parameters_of(own), parameters_of(other)))
                found[make.__name__, kind.__name__, store is None] = all(alike)
        return found

    for answer in launch(updated_on_the_host, 2, dtype):
        assert len(answer) == 9 and all(answer.values()), answer


def test_an_update_of_shards_is_refused_where_there_are_none():
    with pytest.raises(TypeError, match="DataParallel has no shards to update; use Zero1"):
        gpt_engine(0, FakeCommunicator(0, 2), update=ShardedUpdate)


@pytest.mark.parametrize("make", STAGES)
def test_gradients_of_several_reductions_add_up_wherever_they_are_stored(make):
    def twice_reduced(comm, make):
        """Steps of two backwards, both of which reduce, a skipped one between them."""
        found = []
        for store in (None, Elsewhere()):
            engine = gpt_engine(make, comm, store=store)
            for step, micro_batches in enumerate(token_batches(4, 2)):
                for tokens in micro_batches:
                    gradients_of_step(engine, tokens[None])
                engine.skip_step() if step == 2 else engine.step()
            found.append(parameters_of(engine))
        return equal(*found)

    assert all(launch(twice_reduced, 2, make))


def stepped_again(comm, make, dtype):
    """Whether a step whose optimizer raised in its second bucket ends, tried again, where it would have."""
    found = []
    for store in (None, *([Elsewhere()] if make in STAGES else [])):
        expected, engine = (gpt_engine(make, comm, dtype, **how) for how in ({}, {"store": store} if store else {}))
        for each in (expected, engine):
            gradients_of_step(each)
        expected.step()
        updated = itertools.count(1 if make in STAGES else 2)

        def in_the_second(*_, updated=updated):
            if next(updated) == 2:
                raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError), engine.optimizer.register_step_pre_hook(in_the_second):
            engine.step()
        engine.step()
        found.append(equal(parameters_of(expected), parameters_of(engine)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ENGINES)
def test_a_step_that_raised_can_be_tried_again(make, dtype):
    assert all(map(all, launch(stepped_again, 2, make, dtype)))
