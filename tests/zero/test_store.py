"""Shards that are stored elsewhere: the same parameters to the bit, fewer bytes here; when an engine asks for which."""

import contextlib

import pytest
import torch
from zero_kit import ADAMW, equal, gpt, parameters_of, token_batches, train_gpt

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import Zero1, Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes

BUCKET = 20_000
STAGES = (Zero1, Zero2, Zero3)


class Elsewhere:
    """A store that keeps contents as Python bytes, and notes what it was asked."""

    def __init__(self):
        self.tensors, self.contents, self.asked = {}, {}, []

    def put(self, key, tensors, changed=True):
        self.asked.append(("put", key))
        if changed or key not in self.contents:
            self.contents[key] = [bytes(x.detach().reshape(-1).view(torch.uint8).tolist()) for x in tensors]
        self.tensors[key] = tensors
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def prefetch(self, key):
        self.asked.append(("prefetch", key))

    def get(self, key):
        self.asked.append(("get", key))
        for tensor, content in zip(self.tensors.pop(key, ()), self.contents.get(key, ()), strict=True):
            tensor.untyped_storage().resize_(len(content))
            if content:
                tensor.detach().view(-1).copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype))


class Forgetful(Elsewhere):
    """The mutant: says that it took the shards, and keeps them here."""

    def put(self, key, tensors, changed=True):
        self.asked.append(("put", key))


def trained(comm, dtype):
    found = {}
    for make in STAGES:
        for store in (None, Elsewhere()):
            engine = make(gpt(dtype=dtype), comm, ADAMW, bucket_bytes=BUCKET, store=store)
            train_gpt(engine, 3)
            saved = engine.state_dict()
            again = make(gpt(dtype=dtype), comm, ADAMW, bucket_bytes=BUCKET, store=Elsewhere() if store else None)
            again.load_state_dict(saved)
            for each in (engine, again):
                train_gpt(each, 1)
            found[make.__name__, store is not None] = parameters_of(engine), parameters_of(again)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_parameters_wherever_shards_are_stored(dtype):
    for answer in launch(trained, 2, dtype):
        for make in STAGES:
            expected, continued = answer[make.__name__, False]
            assert equal(expected, continued)
            assert all(equal(expected, ours) for ours in answer[make.__name__, True])


def held(make, store, dtype):
    """(ledger between two steps, peak of a step): bytes here."""
    engine = make(gpt(dtype=dtype), FakeCommunicator(0, 4), ADAMW, bucket_bytes=BUCKET, store=store)
    for step in range(3):
        with memory.track(engine.model, engine.optimizer, *getattr(engine, "shards", {}).values()) as t:
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
    engine, _, _ = held(Zero2, store := Elsewhere(), torch.float32)
    store.asked.clear()
    x = token_batches(1)[0, 0, :2]
    engine.backward(engine.forward(x, x))
    assert store.asked == []  # nothing that stage 2 stores is needed in forward and backward
    engine.step()
    last = len(engine.buckets) - 1
    expected = []
    for i in range(last + 1):
        key = ("states", i)
        expected += [("get", key), *([("prefetch", ("states", i + 1))] if i < last else []), ("put", key)]
    assert store.asked == expected


class Noting(Elsewhere):
    """Notes what was put of parameters' shards, and whether it was changed."""

    def put(self, key, tensors, changed=True):
        super().put(key, tensors, changed)
        self.asked[-1] = ("put", key, changed)


def test_shards_that_were_only_gathered_are_put_as_unchanged_and_the_next_is_prefetched():
    engine, _, _ = held(Zero3, store := Noting(), torch.float32)
    store.asked.clear()
    engine.gathering.look_ahead = 0
    x = token_batches(1)[0, 0, :2]
    engine.backward(engine.forward(x, x))
    assert {asked[2] for asked in store.asked if asked[0] == "put"} == {False}
    assert any(asked[0] == "prefetch" for asked in store.asked)
    engine.step()
    puts = [asked for asked in store.asked if asked[0] == "put"]
    assert all(changed for _, _, changed in puts[-2 * len(engine.buckets):])
    assert all(tensor.dim() for kept in store.tensors.values() for tensor in kept)  # step counters are read on the host


def test_an_update_that_raises_leaves_shards_where_they_are_stored():
    engine, _, _ = held(Zero3, store := Elsewhere(), torch.float32)
    x = token_batches(1)[0, 0, :2]
    engine.backward(engine.forward(x, x))
    hook = engine.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        engine.step()
    hook.remove()
    assert all(tensor.untyped_storage().nbytes() == 0 for kept in store.tensors.values() for tensor in kept)
    assert len(store.tensors) == 2 * len(engine.buckets)
