"""Shards in host memory: the same numbers to the bit, bytes on the device and on the host, what is refused."""

import threading

import pytest
import torch
from offload_kit import LOW, STAGES, alone, check_one_engine, continued, engine_of
from patience import against_the_clock, check
from rank_pool import on_ranks
from zero_kit import BUCKET, gradients_of_step, token_batches, train_gpt

from refimpl import common, memory
from refimpl.comm import FakeCommunicator, Link
from refimpl.offload import HostStore
from refimpl.zero import Zero1, Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes


@pytest.mark.parametrize(("make", "dtype", "world_size"), [  # each stage and each number of ranks in each dtype
    (Zero1, torch.float32, 1), (Zero1, LOW, 2), (Zero2, torch.float32, 2), (Zero2, LOW, 4), (Zero3, torch.float32, 4),
    (Zero3, LOW, 1)])
@on_ranks("world_size")
def test_training_is_bit_equal_and_goes_on_under_another_store(comm, make, dtype, world_size):
    assert continued(comm, make, dtype, 4, HostStore(), (HostStore(depth=1), None)) == [True] * 4


class Forgetful(HostStore):
    """The mutant: copies to the host, and leaves the tensors where they are."""

    def put(self, key, tensors, changed=True):
        contents = [tensor.detach().clone() for tensor in tensors]
        super().put(key, tensors, changed)
        for tensor, content in zip(tensors, contents, strict=True):
            tensor.untyped_storage().resize_(content.nbytes)
            tensor.detach().copy_(content)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("make", STAGES)
@pytest.mark.parametrize("kind", [HostStore, Forgetful])
def test_states_are_on_the_host_between_steps_and_on_the_device_no_more(kind, make, dtype):
    engine = engine_of(FakeCommunicator(0, 4), make, dtype, store=(store := kind()))
    with memory.track(engine.model) as t:
        for tokens in token_batches(2):
            gradients_of_step(engine, tokens)
            engine.step()
    states = model_state_bytes(engine.model, 4, engine.stage, bucket_bytes=BUCKET)
    counters = 4 * sum(len(pairs) for pairs in engine.update.pieces.values())
    assert (t.now["optimizer state"] == counters) == (kind is HostStore)
    shards = sum(x.nbytes for x in engine.parameters.shards.values())
    gradients = states["gradients"] if make is not Zero1 else 0
    on_the_host = states["optimizer state"] - counters + gradients + shards * (make is Zero3)
    assert store.host_bytes == on_the_host == t.now["host memory"]


def test_a_state_goes_there_and_back_once_in_a_step_and_gradients_too():
    engine = engine_of(FakeCommunicator(0, 4), Zero2, LOW, store=(store := HostStore()))
    train_gpt(engine, 2)
    before = dict(store.moved)
    train_gpt(engine, 1)
    elements = sum(bucket.shard_numel for bucket in engine.buckets)
    mine = sum(own.numel() for pairs in engine.update.pieces.values() for _, own in pairs)
    one_way = 4 * elements + 8 * mine + 2 * elements  # masters, moments, gradients
    assert all(store.moved[direction] - count == one_way for direction, count in before.items()) and len(before) == 2


def test_parameters_that_were_only_gathered_are_not_copied_to_the_host_again():
    engine = engine_of(FakeCommunicator(0, 4), Zero3, store=(store := HostStore()))
    train_gpt(engine, 2)
    before = dict(store.moved)
    gradients_of_step(engine)
    shards = sum(x.nbytes for x in engine.parameters.shards.values())
    assert store.moved["to host"] - before["to host"] == shards  # the gradients alone, which are as large
    assert store.moved["to device"] - before["to device"] > shards  # gathered in forward and in backward


def tensors(*sizes, start=0.0):
    return [torch.arange(float(size)) + start for size in sizes]


def test_contents_come_back_to_the_same_tensors_to_the_bit():
    with HostStore() as store:
        given, expected = tensors(5, 7), tensors(5, 7)
        store.put(("states", 0), given)
        assert not any(x.untyped_storage().nbytes() for x in given)
        store.prefetch(("states", 0))
        store.get(("states", 0))
        assert all(map(torch.equal, given, expected))
        given[0].add_(1)
        store.put(("states", 0), given, changed=True)
        store.get(("states", 0))
        assert torch.equal(given[0], expected[0] + 1) and torch.equal(given[1], expected[1])


def test_what_did_not_change_is_not_copied():
    with HostStore() as store:
        store.put(("parameters", 0), given := tensors(8))
        for _ in range(3):
            store.get(("parameters", 0))
            store.put(("parameters", 0), given, changed=False)
        assert store.moved == {"to host": 32, "to device": 96}


def test_host_memory_of_what_was_dropped_is_used_again():
    with HostStore() as store:
        for step in range(3):
            store.put(("gradients", 0), tensors(8, start=step))
            store.drop(("gradients", 0))
            store.put(("gradients", 1), tensors(8))
            store.drop(("gradients", 1))
        store.get(("gradients", 5))  # nothing was put
        assert store.host_bytes == 32
    assert store.host_bytes == 0


@against_the_clock
def test_copies_on_a_link_take_turns_in_each_direction_and_both_directions_go_at_once():
    store = HostStore(rate=Link(1e6), depth=4)
    with common.spans.SpanRecorder() as recorder:
        for i in range(3):
            store.put(("states", i), tensors(10_000))  # 40 ms each
        store.prefetch(("states", 0))
        store.get(("states", 0))
        store.finish()
    spans = sorted(recorder.recording.spans, key=lambda span: span.end)
    out, (back,) = ([span for span in spans if span.kind == kind] for kind in ("to host", "to device"))
    assert [span.name for span in out] == ["states 0", "states 1", "states 2"]
    begin = min(span.begin for span in out)
    for i, span in enumerate(out):
        check([(span.end - begin) / 1e9], 0.04 * (i + 1))
    check([(back.end - begin) / 1e9], 0.08)  # after its own copy to the host, beside the others


def test_a_store_of_two_engines_is_refused():
    check_one_engine(HostStore(), 2)


def test_a_key_that_is_away_is_not_put_over():
    store = HostStore()
    store.put(("states", 0), tensors(4))
    with pytest.raises(RuntimeError, match=r"\('states', 0\) was put again while .* two engines"):
        store.put(("states", 0), tensors(4))


def test_a_closed_store_is_refused_and_so_is_a_second_close():
    store = HostStore()
    store.put(("states", 0), tensors(4))
    store.close()
    for again in (store.close, lambda: store.get(("states", 0)), lambda: store.put(("states", 1), tensors(4)),
                  lambda: store.prefetch(("states", 0)), lambda: store.drop(("states", 0)), store.finish,
                  lambda: alone(Zero1, store=store), store.__enter__):
        with pytest.raises(RuntimeError, match="closed"):
            again()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"depth": 0}, ValueError, "depth=0"), ({"depth": 1.5}, ValueError, "depth=1.5"),
    ({"rate": 16e9}, TypeError, "rate=16000000000.0: expected a refimpl.comm.Link")])
def test_bad_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        HostStore(**options)


def test_a_part_of_a_storage_is_refused():
    with pytest.raises(ValueError, match="fills its storage"):
        HostStore().put(("states", 0), [torch.zeros(8)[2:]])


def test_nothing_is_left_running():
    before, engine = threading.active_count(), alone(Zero3, store=HostStore())
    train_gpt(engine, 1)
    assert threading.active_count() == before


def test_no_more_than_depth_buckets_are_leaving_at_a_time():
    with HostStore(rate=Link(1e6), depth=2) as store:
        for i in range(6):
            store.put(("states", i), [torch.ones(5000)])  # 20 ms on the link
            assert len(store._leaving) <= 2
