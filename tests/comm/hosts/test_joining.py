"""Ranks that meet beside the store of others before them: torchrun has started them anew."""

import threading

import pytest
import torch.distributed as dist

from refimpl.comm import RankError
from refimpl.comm.hosts import joining
from refimpl.comm.hosts.facts import facts_here


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(joining, "JOIN", 20)
    return dist.HashStore()


def come(store, *order):
    """Let ranks of 2 come, one after the other. Returns [(rank, (ranks that it has met, number of the meeting))], or
    what it was told instead."""
    found = []

    def meet(rank):
        try:
            hosts, number = joining.meet(store, rank, 2, "gloo")
            found.append((rank, (len(hosts.facts), number)))
        except RankError as error:
            found.append((rank, str(error)))

    threads = [threading.Thread(target=meet, args=[rank], daemon=True) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.2)
    for thread in threads:
        thread.join(10)
    return sorted(found, key=str)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_is_started_anew_meets_nobody_of_before(store, order):
    for number in (1, 2, 3):
        assert come(store, *order) == [(0, (2, number)), (1, (2, number))]


@pytest.mark.parametrize(("died", "order"), [(0, (0, 1)), (0, (1, 0)), (1, (1, 0))])
def test_one_that_has_died_before_all_had_met(store, died, order):
    """What it has written is there; it is started anew."""
    number = store.add("meetings", int(died == 0)) or 1
    joining._come(dist.PrefixStore(f"meeting {number}", store), facts_here(died, 2, "gloo", "?"))
    assert come(store, *order) == [(rank, (2, 2 - died)) for rank in (0, 1)]


def test_two_ranks_0(store):
    """Who has come to the meeting of one goes on to that of the other."""
    found = come(store, 0, 0, 1)
    assert (0, (2, 2)) in found and (1, (2, 2)) in found
    assert any("rank 0 is there twice: process" in str(each) for _, each in found)
