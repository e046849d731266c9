"""Buckets: what lies where, and that shards and pieces cover everything once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.zero.bucket import ALIGNMENT, Bucket, buckets_of


def named(sizes, dtype=torch.float32):
    return [(f"p{i}", torch.nn.Parameter(torch.zeros(size, dtype=dtype))) for i, size in enumerate(sizes)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), world_size=st.integers(1, 9),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_pieces_of_all_ranks_cover_each_parameter_once(sizes, world_size, dtype):
    bucket = Bucket(named(sizes, dtype), world_size)
    assert bucket.numel == world_size * bucket.shard_numel >= sum(sizes)
    assert bucket.shard_numel * dtype.itemsize % ALIGNMENT == 0
    assert bucket.nbytes < sum(-(-n * dtype.itemsize // 16) * 16 for n in sizes) + 16 * world_size
    flat, seen = torch.arange(bucket.numel), {name: [] for name, _ in named(sizes)}
    for rank in range(world_size):
        shard = bucket.shard(flat, rank)
        for piece in bucket.pieces(rank):
            part = shard[piece.place : piece.place + piece.end - piece.first]
            assert part.tolist() == flat[piece.slot.first + piece.first : piece.slot.first + piece.end].tolist()
            seen[piece.slot.name] += range(piece.first, piece.end)
    assert all(seen[f"p{i}"] == list(range(size)) for i, size in enumerate(sizes))


def test_views_have_the_parameters_shapes_and_share_the_buffer():
    bucket = Bucket([("a", torch.nn.Parameter(torch.zeros(2, 3))), ("b", torch.nn.Parameter(torch.zeros(())))], 2)
    flat = torch.zeros(bucket.numel)
    a, b = bucket.views(flat)
    a.fill_(1), b.fill_(2)
    assert a.shape == (2, 3) and b.shape == () and flat.sum() == 8
    assert [slot.first * 4 % ALIGNMENT for slot in bucket.slots] == [0, 0]


def test_buckets_are_filled_from_the_last_parameter_and_kinds_do_not_mix():
    parameters = named([100, 10, 10, 10]) + named([10], torch.bfloat16)
    buckets = buckets_of(parameters, 2, bucket_bytes=100)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["p0"], ["p3", "p2"], ["p1"], ["p0"]]
    assert [bucket.dtype for bucket in buckets] == [torch.bfloat16] + 3 * [torch.float32]
    assert buckets[-1].nbytes >= 400  # larger than bucket_bytes: alone


def test_padding_counts_into_a_buckets_bytes():
    """Of nine tensors of 4 bytes, 16 with the padding, three come to 36 bytes; not nine."""
    assert [len(bucket.slots) for bucket in buckets_of(named([1] * 9), 1, 36)] == [3, 3, 3]
