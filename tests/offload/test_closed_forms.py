"""Bytes in both memories and on the link, 0 off, at every stage and ratio; the arithmetic of tiles."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_kit import LOW, engine_of
from zero_kit import ENGINES, gradients_of_step, token_batches

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.offload import CPUAdam, HostStore, closed_forms
from refimpl.offload.closed_forms import cpu_adam_bytes, cpu_adam_traffic, host_store_bytes, host_store_traffic
from refimpl.zero.closed_forms import gathers

SMALL = 1000  # elements of a tile
DTYPES = [torch.float32, LOW]


def traced(engine, link, micro_batches=1, clips=0):
    """({"device", "host"} after a backward, bytes copied in the step) of the third step."""
    with memory.track(engine.model, engine.optimizer) as t:
        for tokens in token_batches(3, micro_batches):
            before = dict(link.moved) if engine.stage else {"to host": 0, "to device": 0}
            gradients_of_step(engine, tokens)
            now = t.now
            for _ in range(clips):
                engine.clip_grad_norm_(1.0)
            engine.step()
    moved = {key: value - before[key] for key, value in link.moved.items()} if engine.stage else before
    return {"device": {name: now[name] for name in ("optimizer state", "gradients")},
            "host": now["host memory"] if "host memory" in now else 0}, moved


# Each stage with each dtype, ratio and number of micro-batches, and each two of these.
@pytest.mark.parametrize(("make", "dtype", "ratio", "micro_batches"), [
    (make, DTYPES[(i + j) % 2], ratio, 1 + (i + j + j // 2) % 2)
    for i, make in enumerate(ENGINES) for j, ratio in enumerate([0.0, 0.3, 0.75, 1.0])])
def test_bytes_of_cpu_adam(make, dtype, ratio, micro_batches):
    options = {"update": CPUAdam(ratio=ratio, sub_group_size=SMALL)} if make.stage else {}
    engine = engine_of(FakeCommunicator(1, 4), make, dtype, **options)
    found, moved = traced(engine, engine.update.link if make.stage else None, micro_batches, clips=1)
    several = micro_batches > 1 and make.stage >= 2
    assert found == cpu_adam_bytes(engine.buckets, make.stage, ratio=ratio, sub_group_size=SMALL, rank=1,
                                   several=several)
    assert moved == cpu_adam_traffic(engine.buckets, make.stage, ratio=ratio,
                                     micro_batches=micro_batches if make.stage >= 2 else 1)


def test_of_gradients_the_rest_of_a_shard_stays_on_the_device_and_at_stage_1_all():
    buckets = engine_of(FakeCommunicator(1, 4), ENGINES[2], torch.float32).buckets
    stay = [cpu_adam_bytes(buckets, stage, ratio=0.75, rank=1)["device"]["gradients"] for stage in (1, 2, 3)]
    assert stay[0] == sum(bucket.nbytes for bucket in buckets)
    assert stay[0] / 16 <= stay[1] == stay[2] < stay[0] / 14  # a quarter of one of four shards


@pytest.mark.parametrize(("micro_batches", "clips"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", ENGINES)
def test_bytes_of_a_host_store(make, dtype, micro_batches, clips):
    store = HostStore()
    engine = engine_of(FakeCommunicator(1, 4), make, dtype, **({"store": store} if make.stage else {}))
    found, moved = traced(engine, store, micro_batches, clips)
    if make.stage == 1:  # the whole buffer is there in place of gradients
        assert found["device"]["gradients"] == sum(bucket.nbytes for bucket in engine.buckets)
    assert found == host_store_bytes(engine.buckets, make.stage, rank=1) and store.host_bytes == found["host"]
    gathered = gathers(engine.model, engine.buckets) if make.stage == 3 else ()
    assert moved == host_store_traffic(engine.buckets, make.stage, rank=1, micro_batches=micro_batches, clips=clips,
                                       gathers=gathered)


@pytest.mark.parametrize("form", [host_store_bytes, host_store_traffic, cpu_adam_bytes, cpu_adam_traffic])
def test_an_unknown_stage_is_named(form):
    with pytest.raises(ValueError, match="stage=4: expected 0, 1, 2 or 3"):
        form([], 4)


def test_seconds_of_a_link():
    assert closed_forms.link_seconds({"to host": 32e9, "to device": 8e9}, 16e9) == {"to host": 2.0, "to device": 0.5}


@given(st.integers(1, 20), st.floats(0.01, 10), st.floats(0.01, 10), st.integers(2, 3))
def test_equal_tiles_take_k_times_the_longer_and_once_the_shorter(count, compute, copy, buffers):
    seconds, waited = closed_forms.pipelined([compute] * count, [copy] * count, buffers)
    assert seconds == pytest.approx(count * max(compute, copy) + min(compute, copy))
    assert waited == pytest.approx(seconds - count * compute)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=12))
def test_no_order_of_tiles_beats_the_sums(tiles):
    computes, copies = zip(*tiles, strict=True)
    seconds, waited = closed_forms.pipelined(computes, copies)
    assert max(sum(computes), sum(copies)) - 1e-9 <= seconds <= sum(computes) + sum(copies) + 1e-9
    assert waited == pytest.approx(seconds - sum(computes))


def test_tiles_that_wait_for_one_buffer_hide_nothing():
    slow = functools.partial(closed_forms.pipelined, [1.0] * 5, [1.0] * 5)
    assert slow(buffers=1)[0] == 10.0 and slow(buffers=2)[0] == 6.0
