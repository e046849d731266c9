"""Which buckets are whole when: counted, ahead of time, and in the same order on every rank."""

import pytest
import torch

from refimpl.comm import FakeCommunicator
from refimpl.zero.bucket import Bucket
from refimpl.zero.gathering import Gathering


class Recording(FakeCommunicator):
    """Which gathers were begun, in order."""

    begun = ()

    def all_gather(self, x, *, out=None, async_op=False, label=""):
        self.begun = [*self.begun, out]
        return super().all_gather(x, out=out, async_op=async_op, label=label)


def made(look_ahead=10**9, limit=10**9):
    """(gathering, buckets, begun): buckets of 8, 8 and 16 elements; `begun()` gives their numbers since last time."""
    comm = Recording(0, 2)
    buckets = [Bucket([(f"p{i}", torch.nn.Parameter(torch.zeros(n)))], 2) for i, n in enumerate((8, 8, 16))]
    full = {bucket: torch.zeros(bucket.numel) for bucket in buckets}
    shards = {bucket: torch.full((bucket.shard_numel,), float(i)) for i, bucket in enumerate(buckets)}
    for tensor in full.values():
        tensor.untyped_storage().resize_(0)

    def begun():
        found = [[x is full[b] for b in buckets].index(True) for x in comm.begun]
        comm.begun = []
        return found

    return Gathering(comm, shards, full, look_ahead, limit), buckets, begun


def forward_and_backward(gathering, buckets):
    """In each moment, which are whole."""
    seen = []
    for bucket in (*buckets, *reversed(buckets)):
        gathering.gather(bucket)
        seen.append([gathering.whole[b].untyped_storage().nbytes() > 0 for b in buckets])
        assert gathering.whole[bucket].unique().tolist() == [buckets.index(bucket)]
        gathering.release(bucket)
    gathering.end_step()
    assert gathering.live() == 0
    return seen


def test_the_first_step_gathers_when_needed_the_second_prefetches():
    gathering, buckets, begun = made()
    assert forward_and_backward(gathering, buckets) == [
        [True, False, False], [False, True, False], [False, False, True], [False, False, True], [False, True, False],
        [True, False, False]]
    assert begun() == [0, 1, 2, 2, 1, 0]
    forward_and_backward(gathering, buckets)
    assert begun() == [0, 1, 2, 1, 0]  # the last one stays for backward


def test_a_large_head_does_not_stay_for_backward():
    gathering, buckets, begun = made()
    gathering.large_heads = {buckets[2]}
    whole = forward_and_backward(gathering, buckets)
    begun()
    assert forward_and_backward(gathering, buckets)[:3] == [[True, True, True], [False, True, True], whole[2]]
    assert begun() == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(("options", "ahead"), [
    ({"look_ahead": 0}, [[0], [1], [2], [], [1], [0]]), ({"look_ahead": 1}, [[0, 1], [2], [], [1], [0], []]),
    ({"limit": 16}, [[0, 1], [], [2], [], [1, 0], []])], ids=str)
def test_no_further_ahead_than_asked(options, ahead):
    gathering, buckets, begun = made(**options)
    forward_and_backward(gathering, buckets)
    begun()
    found = []
    for bucket in (*buckets, *reversed(buckets)):
        gathering.gather(bucket)
        gathering.release(bucket)
        found.append(begun())
    assert found == ahead


def test_a_step_that_goes_another_way_gathers_nothing_ahead_and_what_came_in_vain_is_freed():
    gathering, buckets, begun = made()
    forward_and_backward(gathering, buckets)
    begun()
    gathering.gather(buckets[0])
    assert begun() == [0, 1, 2]
    gathering.gather(buckets[2])  # not 1, as last time
    gathering.release(buckets[2])
    assert not gathering.whole[buckets[2]].untyped_storage().nbytes()  # though it was third last time, and comes again
    gathering.release(buckets[0])
    gathering.gather(buckets[0])
    assert begun() == [0]
    gathering.end_step()
    assert gathering.live() == 0 and all(x.untyped_storage().nbytes() == 0 for x in gathering.whole.values())


def test_what_is_on_its_way_does_not_keep_the_next_from_coming():
    (gathering, buckets, begun), found = made(look_ahead=2), []
    for _ in range(2):
        for i in (2, 0, 1, 2):
            gathering.gather(buckets[i])
            gathering.release(buckets[i])
            found.append(begun())
        gathering.end_step()
    assert found == [[2], [0], [1], [2], [2, 0, 1], [2], [], []]


def test_the_buckets_of_one_unit_count_as_one():
    gathering, buckets, begun = made(look_ahead=1)
    unit_of = dict(zip(buckets, ("first", "second", "second"), strict=True))
    for ahead in ([[0], [1], [2]], [[0, 1, 2], [], []]):
        for bucket, expected in zip(buckets, ahead, strict=True):
            gathering.gather(bucket, unit_of[bucket])
            gathering.release(bucket)
            assert begun() == expected
        gathering.end_step()


def test_the_last_of_several_users_frees_it():
    gathering, (bucket, *_), begun = made()
    for _ in range(3):
        gathering.gather(bucket)
    for live in (8, 8, 0):
        gathering.release(bucket)
        assert gathering.live() == live
    gathering.release(bucket)  # once too often does no harm
    gathering.gather(bucket)
    assert gathering.live() == 8 and begun() == [0, 0]
