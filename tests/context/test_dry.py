"""Context parallelism in a dry run: the bytes of real ranks, and a million tokens on 64 ranks in less than a minute."""

import functools
import time

import pytest
import torch
from families import LLAMA
from rank_pool import on_ranks

from refimpl import memory
from refimpl.attention import tiled_pair
from refimpl.checkpointing import recompute
from refimpl.comm import FakeCommunicator
from refimpl.context import AttentionPair, SequenceParallelAttention, context_parallel, dense_pair, ring_attention
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero3

PAIRS = {"dense": dense_pair, "tiled": tiled_pair}
CONFIG = GPTConfig(vocab_size=61, context_length=1024, layers=2, hidden=64, heads=4, mlp_hidden=96, **LLAMA)
LLAMA_3_8B = GPTConfig(128256, 2**20, 32, 4096, 32, **LLAMA | {"kv_heads": 8}, mlp_hidden=14336, rotary_base=500000.0)


def step(comm, config, order, pair):
    """A step of training with recomputation and ZeRO-3 over the same ranks; returns what it sent."""
    attention = SequenceParallelAttention(comm, "ring", order=order, attention=PAIRS[pair])
    model = context_parallel(GPT(config, dtype=torch.bfloat16), attention)
    with recompute(model.blocks):
        engine = Zero3(model, comm, functools.partial(torch.optim.AdamW, lr=1e-4))
        tokens = attention.shard(torch.zeros(1, config.context_length, dtype=torch.int64))
        before = comm.traffic
        engine.backward(engine.forward(tokens, tokens))
        engine.step()
    return comm.traffic - before


@pytest.mark.parametrize(("order", "pair", "N"), [("plain", "dense", 1), ("plain", "tiled", 2), ("zig-zag", "dense", 2),
                                                  ("plain", "dense", 4), ("zig-zag", "tiled", 4)])
@on_ranks("N")
def test_the_bytes_and_traffic_of_real_ranks(comm, order, pair, N):
    with memory.track() as t:
        sent = step(comm, CONFIG, order, pair)
    dry = memory.dry_run(step, FakeCommunicator(comm.rank, N), CONFIG, order, pair)
    assert dict(dry.peak) == dict(t.peak) and dict(dry.result) == dict(sent)


def test_a_million_tokens_of_llama_3_on_64_ranks():
    begin = time.process_time()  # others use the machine, too
    t = memory.dry_run(step, FakeCommunicator(5, 64), LLAMA_3_8B, "zig-zag", "tiled")
    assert time.process_time() - begin < 60
    peak, state = t.peak, 2 * LLAMA_3_8B.parameter_count() / 64
    assert peak["parameters"] == 2  # one NaN: shards are the masters, and no unit is whole there
    assert peak["optimizer state"] == pytest.approx(2 * state, rel=0.01)
    rows, terms = 2**20 // 64, memory.activation_terms(LLAMA_3_8B, 1, 2**20 // 64, torch.bfloat16)
    outside = sum(terms.values()) - terms["blocks"] - terms["loss weight"]
    assert peak["activations"] == outside + 32 * 2 * rows * 4096  # of each block its x
    assert peak.total < 32 * 2**30
    kv = 2 * rows * 8 * 128  # of a layer, elements
    assert t.result["send"] == 32 * (3 * 63 * 2 * kv + 64 * 4 * kv)  # forward, again, and backward with gradients


@pytest.mark.parametrize(("order", "blocks"), [("plain", 2), ("zig-zag", 3)])
def test_a_ring_of_64_ranks_computes_one_block_of_each_shape(order, blocks):
    """The block of its own keys, and one of others'; in zig-zag order those before it and those after."""
    calls = []

    def counted(function):
        return lambda *given, **how: (calls.append(function), function(*given, **how))[1]

    def run():
        qkv = [torch.zeros(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
        ring_attention(*qkv, FakeCommunicator(5, 64), causal=True, order=order,
                       attention=AttentionPair(*map(counted, dense_pair))).sum().backward()

    memory.dry_run(run)
    assert [calls.count(each) for each in dense_pair] == [blocks, blocks]
