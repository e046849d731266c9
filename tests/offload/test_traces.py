"""What an engine asks, in closed form: bytes on a disk 0 off; and the trace itself, as a store records it."""

import functools

import pytest
import torch
from offload_kit import STAGES, alone, engine_of, train_gpt
from zero_steps import stack, update

from refimpl.comm import FakeCommunicator
from refimpl.offload import DiskStore, TieredStore
from refimpl.offload.errors import StoreError
from refimpl.offload.tiers.step_simulator import simulate
from refimpl.offload.traces import disk_store_bytes, disk_store_traffic, engine_trace, least_device_bytes, stored_bytes
from refimpl.zero import Zero1, Zero2, Zero3


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("make", STAGES)
def test_bytes_of_the_file_and_of_a_step_are_0_off(make, world, dtype, micro_batches, tmp_path):
    with DiskStore(tmp_path, buffer_bytes=8192) as store:
        engine = engine_of(FakeCommunicator(0, world), make, dtype, store=store)
        train_gpt(engine, 2, micro_batches)
        assert store.file_bytes == disk_store_bytes(engine.buckets, make.stage)
        before, found = (store.traffic.read, store.traffic.written), []  # the buckets that a micro-batch gathers
        if make is Zero3:
            launch = engine.parameters.gathering._launch
            engine.parameters.gathering._launch = lambda bucket: found.append(bucket) or launch(bucket)
        train_gpt(engine, 1, micro_batches)
        assert len(found) % micro_batches == 0
        options = {"gathers": found[: len(found) // micro_batches]} if make is Zero3 else {}
        expected = disk_store_traffic(engine.buckets, make.stage, micro_batches=micro_batches, **options)
        assert (store.traffic.read - before[0], store.traffic.written - before[1]) == tuple(expected.values())


def test_bytes_of_a_file_in_which_places_of_masters_are_taken_again(tmp_path):
    """Of layers whose masters fill whole blocks, and other ones than their moments and masters do together."""
    for make in STAGES:
        for layers in (2, 3):
            with DiskStore(tmp_path, buffer_bytes=8192) as store:
                engine = make(stack(layers).bfloat16(), FakeCommunicator(0, 2), bucket_bytes=1, store=store)
                update(engine, engine(torch.ones(1, 64, dtype=torch.bfloat16)).sum())
                assert store.file_bytes == disk_store_bytes(engine.buckets, make.stage)


@pytest.mark.parametrize("make", [Zero1, Zero2])
def test_the_trace_is_the_one_that_a_store_records(make):
    with TieredStore(host=10**7, device=300_000) as store:
        engine = alone(make, store=store)
        train_gpt(engine, 6)
        found = [event[:3] for event in store.trace()]
        expected = [event[:3] for event in engine_trace(engine.buckets, make.stage)]
        begin = found.index(expected[0]) if expected[0] in found else -1
        assert sorted(map(tuple, found), key=str) == sorted(map(tuple, expected), key=str) and begin >= 0


def test_tiers_are_planned_from_the_closed_form_before_there_is_an_engine():
    """What a simulated step moves is what a real one does, within a twentieth."""
    with TieredStore(host=10**7, device=300_000) as store:
        engine = alone(Zero2, store=store)
        train_gpt(engine, 12)
        moved = sum(store.counts.moved.values())
        planned = simulate(engine_trace(engine.buckets, 2), {}, 300_000, 10**7, steps=12, first=0)
        assert moved == pytest.approx(sum(planned.moved.values()), rel=0.1)
        assert sum(stored_bytes(engine.buckets, 2).values()) > 300_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("make", STAGES)
def test_the_least_device_is_enough_and_a_byte_less_is_not(make, world, dtype, tmp_path):
    make_one = functools.partial(engine_of, FakeCommunicator(0, world), make, dtype)
    least = least_device_bytes(make_one().buckets, make.stage)
    with TieredStore(tmp_path, device=least, buffer_bytes=8192) as store:
        train_gpt(make_one(store=store), 3, 2)
        assert store.plan.tiers["device"].peak == least
    with TieredStore(tmp_path, device=least - 1, buffer_bytes=8192) as store:
        with pytest.raises(StoreError, match=f"device={least - 1:,} bytes.*at least {least:,}.*least_device_bytes"):
            train_gpt(make_one(store=store), 2)
