"""With a store that has shards elsewhere, an engine never has more than two buckets here, whatever it does."""

import functools

import pytest
import torch
from zero_kit import SHARDED, Elsewhere, equal, own_rows, parameters_of, token_batches, train_gpt
from zero_steps import gpt_engine

from refimpl.comm import launch
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.zero import Zero2, Zero3
from refimpl.zero.internals.store import StoredUpdate


class Counting(Elsewhere):
    """Notes the most buckets of which something was here, or on its way."""

    def __init__(self):
        super().__init__()
        self.here, self.most = {}, 0  # key → whether somebody computes with it

    def _come(self, key, computes=True):
        self.here[key] = computes
        self.most = max(self.most, len({number for _, number in self.here}))

    def put(self, key, tensors, changed=True):
        self._come(key)  # one that is put for the first time was here
        super().put(key, tensors, changed)
        del self.here[key]

    def drop(self, key):
        super().drop(key)
        self.here.pop(key, None)

    def prefetch(self, key):
        self._come(key, False)
        super().prefetch(key)

    def get(self, key):
        self._come(key)
        super().get(key)

    def read(self):
        """The most since the last call."""
        assert not any(self.here.values())
        most, self.most = self.most, 0
        return most


def everything(comm, make, dtype, directory, stored=True, **options):
    """{what an engine does: the most buckets that were here meanwhile}, and the parameters in the end."""
    store, found, scaler = Counting() if stored else None, {}, AdaptiveLossScaler(8.0, comm=comm)
    if make is Zero3:
        options["look_ahead"] = 0  # else the next units' shards come ahead

    def note(what, work=lambda: None, *given, **how):
        made = work(*given, **how)
        found[what] = store.read() if store else 0
        return made

    engine = note("made", gpt_engine, make, comm, dtype, store=store, **options)
    for step in range(2):
        for x in token_batches(4)[step, 0].chunk(2):
            mine = own_rows(comm, x)
            engine.backward(scaler.scale(engine.forward(mine, mine) / 2))
        note("gradients")
        note("unscaled", scaler.unscale_, engine)
        note("clipped", engine.clip_grad_norm_, 0.1)
        note("updated", lambda: (scaler.step(engine), scaler.update()))
    with engine.gathered(write=True):
        next(engine.model.parameters()).data.mul_(1.5)
    note("written")
    note("saved", engine.save, directory / "saved")
    note("weights", engine.save_weights, directory / "weights")
    sd = note("put together", engine.state_dict)
    note("taken apart", engine.load_state_dict, sd)
    note("loaded", engine.load, directory / "saved")
    note("updated again", train_gpt, engine, 1)
    return found, len(engine.buckets), parameters_of(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", SHARDED)
def test_no_more_than_two_buckets_are_here(make, dtype, tmp_path):
    with_store, without = (launch(everything, 2, make, dtype, tmp_path, stored) for stored in (True, False))
    for (found, buckets, ours), (_, _, expected) in zip(with_store, without, strict=True):
        assert buckets > 3 and equal(ours, expected)
        assert {what: most for what, most in found.items() if most > 2} == {}
        assert found["updated"] == 2  # one, and the one that is prefetched


class AllAtOnce(StoredUpdate):
    """The mutant: loads all buckets for each."""
    def loaded(self, bucket, following=None, only=None):
        for each in self.pieces:
            if each is not bucket:
                self.stored.get(each, only)
                self.stored.put(each, only)
            self.stored.prefetch(each, only)
        for each in self.pieces:
            self.stored.get(each, only), self.stored.put(each, only)
        return super().loaded(bucket, following, only)


def test_a_store_sees_who_loads_all(tmp_path):
    found, buckets, _ = launch(functools.partial(everything, update=AllAtOnce), 2, Zero2, torch.float32, tmp_path)[0]
    assert found["updated"] == found["saved"] == buckets
