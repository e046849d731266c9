"""The closed forms, and the mapping that holds the counts."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refimpl import memory
from refimpl.comm import COLLECTIVES, Traffic, ring_traffic
from refimpl.comm.traffic import chunk_sizes

WORLDS = st.integers(1, 64)


@given(WORLDS, st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]))
def test_what_N_divides_follows_the_formula_exactly(N, n, itemsize):
    B = N * n * itemsize
    for rank in range(N):
        for collective in ("all_gather", "reduce_scatter", "all_to_all"):
            assert ring_traffic(collective, B, N, rank=rank) * N == (N - 1) * B
        assert ring_traffic("all_reduce", B, N, rank=rank, itemsize=itemsize) * N == 2 * (N - 1) * B


@given(WORLDS, st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]))
def test_over_all_ranks_all_reduce_sends_twice_N_minus_1_tensors_whatever_N_divides(N, n, itemsize):
    B = n * itemsize
    sent = [ring_traffic("all_reduce", B, N, rank=rank, itemsize=itemsize) for rank in range(N)]
    assert sum(sent) == 2 * (N - 1) * B and max(sent) - min(sent) <= 2 * itemsize


def test_unless_it_is_said_a_rank_is_the_first_and_bytes_are_elements():
    """10 bytes on 3 ranks in chunks of 4, 3 and 3: all but two of them, each way."""
    assert [ring_traffic("all_reduce", 10, 3, *rank) for rank in ((), (0,), (1,), (2,))] == [14, 14, 13, 13]
    assert [ring_traffic("broadcast", 10, 3, rank) for rank in range(3)] == [10, 10, 0]  # from rank 0


@given(WORLDS, st.data())
def test_a_broadcast_reaches_all_but_its_source(N, data):
    src = data.draw(st.integers(0, N - 1))
    sent = [ring_traffic("broadcast", 100, N, rank=rank, src=src) for rank in range(N)]
    assert sum(sent) == 100 * (N - 1)
    assert N == 1 or sent[src] == 100


@given(st.integers(0, 200), st.integers(1, 20))
def test_chunks_are_those_of_tensor_split(n, parts):
    assert chunk_sizes(n, parts) == [len(chunk) for chunk in torch.zeros(n).tensor_split(parts)]


def test_an_unknown_collective_is_named():
    with pytest.raises(ValueError, match="gather_all"):
        ring_traffic("gather_all", 8, 2)
    with pytest.raises(ValueError, match="gather_all"):
        Traffic(gather_all=8)
    with pytest.raises(KeyError, match="gather_all"):
        Traffic()["gather_all"]


def test_traffic_is_a_mapping_that_adds_subtracts_and_travels():
    traffic = Traffic(all_reduce=12, send=5, broadcast=0)
    assert dict(traffic) == {"all_reduce": 12, "send": 5} and traffic.total == 17
    assert traffic["all_reduce"] == traffic["all reduce"] == 12
    assert [traffic[name] for name in COLLECTIVES if name not in traffic] == [0, 0, 0, 0]
    assert traffic == {"all_reduce": 12, "send": 5} and {"all_reduce": 12, "send": 5} == traffic
    assert traffic != {"all_reduce": 12} and traffic != 17
    assert traffic - Traffic(send=5) == Traffic(all_reduce=12)
    assert traffic + {"send": 1} == {"all_reduce": 12, "send": 6}
    assert isinstance(traffic - traffic, Traffic) and (traffic - traffic).total == 0
    assert pickle.loads(pickle.dumps(traffic)) == traffic and hash(traffic) == hash(Traffic(send=5, all_reduce=12))


def test_traffic_prints_itself_as_a_table():
    traffic = Traffic(all_gather=3 * 2**20)
    assert str(traffic).splitlines()[1].split() == ["all_gather", "3,145,728", "3.0", "MiB"]
    assert "<table>" in traffic._repr_html_()
    assert "difference" in str(memory.beside(predicted=traffic, counted=traffic))
