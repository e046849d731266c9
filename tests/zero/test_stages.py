"""Every stage beside torch's DDP and a single process, on real ranks; and what is under way, in models of any depth."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from zero_kit import ADAMW, ENGINES, equal, farthest, gpt, own_rows, parameters_of, token_batches
from zero_steps import gpt_engine, most, plainly, tracked, update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.model import GPTConfig
from refimpl.zero.closed_forms import model_state_bytes


@pytest.mark.parametrize("world_size", [1, 8, 2, 3, 4])
def test_parameters_after_ten_steps(world_size):
    def everything(comm):
        model = gpt()
        ddp, mine = DistributedDataParallel(model), (own_rows(comm, tokens) for tokens in token_batches(10)[:, 0])
        found = {"DDP": plainly(model, ADAMW, (ddp(tokens, tokens) for tokens in mine))}
        return found | {make.__name__: parameters_of(gpt_engine(make, comm, steps=10)) for make in ENGINES}

    model, answers = gpt(), launch(everything, world_size)
    alone = plainly(model, ADAMW, (model(tokens, tokens) for tokens in token_batches(10)[:, 0]))
    near = 1e-6 if world_size > 2 else 0  # of two numbers the order of the sum does not matter
    for found in answers:
        for name, ours in found.items():
            assert equal(ours, answers[0][name]), name  # ranks agree to the bit
            assert all(farthest(ours, other) <= near for other in found.values()), name
            assert farthest(ours, alone) <= 1e-4  # another order of sums, which Adam's division makes larger


X = torch.zeros(1, 1, dtype=torch.int64)


def peak_above_states(make, stage, layers, dtype=None, reduce_dtype=None, **options):
    """Bytes at the highest moment of a step, without activations, above the model states; in all a rank of 8."""
    model = gpt(GPTConfig(vocab_size=64, context_length=16, layers=layers, hidden=64, heads=4), dtype)
    engine = make(model, FakeCommunicator(0, 8), ADAMW, bucket_bytes=100_000, reduce_dtype=reduce_dtype, **options)
    t = tracked(engine, X, X, steps=3)
    states = model_state_bytes(model, 8, stage, bucket_bytes=100_000, reduce_dtype=reduce_dtype)
    return most(t, *set(t.timeline.categories) - {"activations", "inputs"}) - states.total


def one_bucket(make):
    """The mutant: `bucket_bytes` is not heeded; in stage 3 the model is a single unit."""
    if make.stage == 3:
        return lambda model, *args, **options: make(model, *args, **{**options, "units": [model]})
    return lambda *args, **options: make(*args, **{**options, "bucket_bytes": 10**12})


LOW = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize("options", [{}, LOW], ids=["fp32", "bf16 added up in fp32"])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_under_way_does_not_grow_with_the_model(stage, options):
    options = {**options, "look_ahead": 1} if stage == 3 else options
    few, many = (peak_above_states(ENGINES[stage], stage, layers, **options) for layers in (4, 12))
    assert many == few
    if stage < 2 and not options:
        return  # gradients are whole and reduced in place: what a bucket bounds is what the messages take, see below
    few, many = (peak_above_states(one_bucket(ENGINES[stage]), stage, layers, **options) for layers in (4, 12))
    grown = 8 * 49_984 * 2  # eight blocks, two bytes each element at the least
    assert many - few >= grown


def unseen(comm, stages, mutated):
    """Bytes of a step's peak that the allocator tells of and the tracker does not: what collectives take."""
    found = {}
    for stage in stages:
        make = one_bucket(ENGINES[stage]) if mutated else ENGINES[stage]
        for layers in (4, 10):  # more than are in flight at once
            model = gpt(GPTConfig(vocab_size=64, context_length=16, layers=layers, hidden=64, heads=4))
            engine = make(model, comm, ADAMW, bucket_bytes=100_000)
            for _ in range(2):
                update(engine, engine.forward(X, X))
            with memory.track(model, engine.optimizer) as t, memory.measure("cpu") as m:
                update(engine, engine.forward(X, X))
            found.setdefault(stage, []).append(m.peak - (t.peak.total - t.start.total))
    return found


def test_what_collectives_take_does_not_grow_with_the_model():
    for few, many in launch(unseen, 2, range(4), False)[0].values():
        assert many <= few + 10_000, (few, many)
    for few, many in launch(unseen, 2, (1, 2), True)[0].values():
        assert many >= few + 6 * 49_984 * 4 // 2 - 10_000  # half of the model, from the other rank
