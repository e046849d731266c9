"""Attention in tiles in a dry run: the bytes of the real run, from one tile of each shape, and then from none."""

import functools
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from refimpl import memory
from refimpl.attention import tiled_attention
from refimpl.attention.call import dry_tiles as dry
from refimpl.model import GPT, GPTConfig

SHAPES = [(2, 4, 2, 300, 300, 16), (1, 2, 1, 70, 130, 8), (1, 4, 4, 513, 513, 32), (2, 2, 2, 130, 33, 8)]  # B H G T S D
OPTIONS = [{}, {"causal": True}, {"causal": True, "window": 20}, {"window": 50}, {"dropout_p": 0.3, "seed": 3},
           {"causal": True, "dropout_p": 0.3, "seed": 3}]


def step(q, k, v, d_out, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    tiled_attention(*leaves, **options).backward(d_out)


def peaks(shape, dtype, **options):
    """Return the peak of a real run, and of two dry runs of the same: by category."""
    B, H, G, T, S, D = shape
    q, k, v, d_out = (torch.randn(B, heads, rows, D, dtype=dtype) for heads, rows in ((H, T), (G, S), (G, S), (H, T)))
    with memory.track(q, k, v, d_out) as t:
        step(q, k, v, d_out, **options)
    dry._taken.clear()
    return [dict(each.peak) for each in (t, *(memory.dry_run(step, q, k, v, d_out, **options) for _ in range(2)))]


@pytest.mark.parametrize(("options", "shape", "dtype"), [
    (options, shape, (torch.float32, torch.bfloat16)[(i + j) % 2])
    for i, options in enumerate(OPTIONS) for j, shape in enumerate(SHAPES)], ids=str)
def test_the_bytes_of_the_real_run(options, shape, dtype):
    real, first, again = peaks(shape, dtype, **options)
    assert first == again == real


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_sequences(options):
    real, first, again = peaks((1, 4, 4, 513, 513, 32), torch.float32, cu_seqlens=[0, 100, 100, 513], **options)
    assert first == again == real


def test_one_that_takes_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(dry, "in_tiles", None)
    monkeypatch.setattr("refimpl.attention.tiled.in_tiles", lambda kind, tensors, options, compute: None if (
        memory.is_dry(tensors[0])) else compute(lambda shape: True))
    real, first, _ = peaks(SHAPES[0], torch.float32, causal=True)
    assert first["temporaries"] < real["temporaries"]


def train(config, T, attention, **options):
    model, tokens = GPT(config, attention, **options), torch.zeros(1, T, dtype=torch.int64)
    model(tokens, tokens).backward()


def test_a_model_takes_as_many_operations_at_any_length():
    config = GPTConfig(vocab_size=61, context_length=2048, layers=2, hidden=64, heads=4)
    in_tiles = functools.partial(tiled_attention, query_tile=32, key_tile=32)
    with memory.track() as real:
        train(config, 256, in_tiles)
    dry._taken.clear()
    first, again, long = (memory.dry_run(train, config, T, in_tiles) for T in (256, 256, 2048))
    assert dict(first.peak) == dict(again.peak) == dict(real.peak)
    assert len(long.ops) == len(first.ops) and len(again.ops) < len(first.ops) < len(real.ops) / 4


def test_what_the_compiler_reads_is_every_tile():
    """Its fake tensors stand for real ones: a tile that is left out would be missing from the program."""
    calls = []
    with FakeTensorMode():
        x = torch.empty(1, 1, 300, 8)
        assert not memory.is_dry(x) and not memory.is_dry(torch.nn.Parameter(x))
        dry.in_tiles("forward", [x], (), calls.append)
        assert calls[0]((1, 2)) and calls[0]((1, 2))
    assert not memory.is_dry(torch.empty(1))


def test_gpt_3_in_less_than_a_third_of_the_time(monkeypatch):
    """One layer of its sizes at 2,048 tokens, beside the same through all tiles."""
    config = GPTConfig.named("gpt3-175b", layers=1)
    def seconds():
        begin = time.process_time()
        memory.dry_run(train, config, 2048, tiled_attention, dtype=torch.bfloat16, device="cpu")
        return time.process_time() - begin

    def every_tile(kind, tensors, options, compute):
        compute(lambda shape: True)

    ours = seconds()
    monkeypatch.setattr("refimpl.attention.tiled.in_tiles", every_tile)
    tiles = seconds()
    assert ours < tiles / 3, (ours, tiles)
