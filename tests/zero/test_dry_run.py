"""Rank 0 of 1,024 trains LLaMA-2-7B and GPT-3 175B: the code that real ranks run, on fake tensors, in seconds."""

import functools
import time

import pytest
import torch
from patience import processor_seconds
from zero_kit import ENGINES
from zero_steps import STATES, most, traced

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.zero.closed_forms import model_state_bytes, paper_bytes, step_traffic

N, TOKENS, TiB = 1024, 256, 2**40


def one_step(name, stage, dtype):
    """(engine, ledger before the update of a step, traffic and trace of the step)."""
    engine = ENGINES[stage](GPT(GPTConfig.named(name), dtype=dtype), FakeCommunicator(0, N))
    x = torch.zeros(1, TOKENS, dtype=torch.int64)
    return engine, *traced(engine, lambda: engine.backward(engine.forward(x, x)))


@functools.lru_cache(maxsize=1)
def dry_run_of(*args):
    """(trace, seconds) of a dry run of `one_step`."""
    began = time.process_time()
    return memory.dry_run(one_step, *args), processor_seconds(time.process_time() - began)


@pytest.fixture(scope="module", autouse=True)
def nothing_kept():
    yield
    dry_run_of.cache_clear()


@pytest.mark.parametrize(("name", "dtype", "stage"), [
    ("llama2-7b", torch.float32, 0), ("llama2-7b", torch.float32, 1), ("llama2-7b", torch.float32, 3),
    ("gpt3-175b", torch.bfloat16, 2), ("gpt3-175b", torch.bfloat16, 3)])
def test_rank_0_of_1024(name, dtype, stage):
    dry, seconds = dry_run_of(name, stage, dtype)
    assert seconds < 30  # one that looks at all pieces for each bucket takes longer
    engine, now, sent, t = dry.result
    expected = model_state_bytes(engine.model, N, stage)
    assert [now[name] for name in STATES[:2]] == [expected[name] for name in STATES[:2]]
    assert t.now["optimizer state"] == expected["optimizer state"] and t.now["gradients"] == 0
    parameters = engine.model.config.parameter_count()
    state = 12 if dtype == torch.bfloat16 and stage else 2 * dtype.itemsize  # with an fp32 master or without
    weight = 0 if dtype == torch.bfloat16 and stage == 3 else dtype.itemsize  # no 16-bit shard beside its master
    near = paper_bytes(parameters, N, stage, weight, dtype.itemsize, state)
    assert near <= expected.total < 1.001 * near  # padding and step counters
    predicted = step_traffic(engine.model, N, stage)  # of a first step stage 3's gathers are more: no order is known
    assert all(sent[name] == count for name, count in predicted.items() if stage < 3 or name != "all_gather")
    kept = most(t, "activations")
    assert kept == memory.activation_bytes(engine.model.config, 1, TOKENS, dtype)
    # Above states and activations: a few buckets that fill, travel or are updated; in stage 3 a few units.
    above = most(t, *set(t.timeline.categories) - {"activations", "inputs", "buffers"}) - expected.total
    assert above <= 5 * max(bucket.nbytes for bucket in engine.buckets)
    assert t.peak.total <= expected.total + above + kept + t.peak["buffers"] + t.peak["inputs"]


def test_to_begin_with_a_model_is_whole_on_every_rank():
    """It is the caller who builds it: at stage 3 no later moment is as high."""
    dry, _ = dry_run_of("gpt3-175b", 3, torch.bfloat16)
    engine, *_, t = dry.result
    whole = 2 * engine.model.config.parameter_count()
    assert whole <= dry.peak_moment("build").ledger["parameters"] < 1.1 * whole and t.peak.total < 0.5 * whole


def test_what_a_gpu_of_80_GB_holds():
    """Of GPT-3's model states, with masters: nothing but stage 3 does; the paper's figure 1."""
    with torch.device("meta"):
        model = GPT(GPTConfig.named("gpt3-175b"), dtype=torch.bfloat16)
    states = [model_state_bytes(model, N, stage).total for stage in range(4)]
    assert states[0] > TiB and 0.6 * TiB < states[1] and 0.3 * TiB < states[2] and states[3] < 3 * 2**30
