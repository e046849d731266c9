"""The start of stage 3: each bucket is made whole once, cut, and its shard leaves for the store at once."""

from zero_kit import FAST, Elsewhere, Frozen, model_of
from zero_steps import most, stack

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero3


def test_a_weight_of_several_units_is_cut_and_sent_once():
    engine = Zero3(model := model_of("twice"), comm := FakeCommunicator(0, 2), FAST)
    bucket, _ = engine.reducer.place[model.one.weight]
    assert len(engine.parameters.units_of[bucket]) > 1
    assert comm.traffic["broadcast"] == sum(bucket.nbytes for bucket in engine.buckets)


def test_shards_leave_for_the_store_while_the_start_goes_on():
    """Of eight layers one is here, whole and its shard beside it; without a store all shards are."""
    layer, most_parameters = 64 * 64 * 4, []
    for store in (None, Elsewhere()):
        with memory.track() as t:
            Zero3(stack(8, device="meta"), FakeCommunicator(0, 2), FAST, store=store)
        most_parameters.append(most(t, "parameters"))
    assert [round(nbytes / layer, 2) for nbytes in most_parameters] == [1 + 8 / 2, 1 + 1 / 2]


def test_shards_of_what_is_frozen_leave_too():
    parameters = Zero3(Frozen(), FakeCommunicator(0, 2), FAST, store=Elsewhere()).parameters
    assert parameters.frozen
    assert not any(parameters.shards[bucket].untyped_storage().nbytes() for bucket in parameters.frozen)
