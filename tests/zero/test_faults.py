"""Ranks that raise, exit or are killed while they train; gradients that are no numbers on one of them; ranks that do
not do the same; more ranks than elements.

The matrix of faults is the whole product of what happens (an exception, `os._exit`, SIGKILL), when (in forward, in
backward, in a collective under way, in step, in save) and the engine, 60 launches of two ranks; `sys.exit` comes once
at each of the moments, at another engine each.
"""

import math
import os
import signal
import sys
import time

import pytest
import torch
from patience import patiently, within
from saving_kit import differing
from torch import nn
from zero_kit import ENGINES, FAST, SGD, equal, model_of, parameters_of, rows_of, square, three_layer_engine
from zero_steps import train

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

PHASES = ("forward", "backward", "collective", "step", "save")
TOLD = {"raise": "raised ValueError: injected", "_exit": "exited with code 3",
        "kill": "was killed by SIGKILL", "exit": "exited with code 4 (sys.exit)"}
SECONDS = 10  # until a fault is named, on a busy machine, too


def raises():
    raise ValueError("injected")


FAULTS = {"raise": raises, "_exit": lambda: os._exit(3), "exit": lambda: sys.exit(4),
          "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}


def arm(engine, phase, fault):
    """From here on this rank comes to grief."""
    def struck(function=lambda *_: None):
        return lambda *args, **kwargs: (function(*args, **kwargs), FAULTS[fault]())[0]

    if phase == "forward":
        engine.model[2].register_forward_pre_hook(struck())
    elif phase == "backward":
        engine.model[2].weight.register_post_accumulate_grad_hook(struck())
    elif phase == "collective":  # it has begun, and the others wait in it
        name = "reduce_scatter" if engine.stage else "all_reduce"
        setattr(engine.comm, name, struck(getattr(engine.comm, name)))
    elif phase == "step":
        engine.optimizer.step = struck(engine.optimizer.step)
    else:
        os.fsync = struck(os.fsync)


def faulty(comm, folder, stage, phase, fault):
    engine = train(three_layer_engine(comm, stage), 1)
    engine.save(folder)
    if comm.rank == 1:
        arm(engine, phase, fault)
    train(engine, 1, 1).save(folder)


def unharmed(comm):
    """rank 0's state_dict after each of two steps."""
    engine = three_layer_engine(comm, 0)
    return [train(engine, 1, step).state_dict() for step in range(2)]


@pytest.fixture(scope="module")
def expected():
    return launch(unharmed, 2)[0]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stage", range(4))
@patiently
def test_a_fault_is_named_in_time_and_the_saved_state_is_whole(stage, phase, expected, tmp_path):
    for fault in ("raise", "_exit", "kill", *["exit"] * (PHASES.index(phase) % 4 == stage)):
        folder, start = tmp_path / fault, time.monotonic()
        with pytest.raises(RankError) as caught:
            launch(faulty, 2, folder, stage, phase, fault, timeout=20)
        within(time.monotonic() - start, SECONDS)
        assert caught.value.rank == 1 and f"rank 1 {TOLD[fault]}" in str(caught.value)
        engine = three_layer_engine(FakeCommunicator(0, 1), 3 - stage, seed=7)
        engine.load(folder)
        found = engine.state_dict()
        assert not differing(found, expected[0]) and differing(found, expected[1])


def poisoned(comm, value, norm_type):
    """What each rank reads of gradients that rank 1 alone has spoiled, and whether the next step goes well."""
    found = {}
    for make in ENGINES:
        engine = make(model_of("twice"), comm, SGD, bucket_bytes=200)
        before, x = parameters_of(engine), rows_of(comm, 0)
        engine.backward(square(engine, x * value if comm.rank == 1 else x))
        norm = engine.clip_grad_norm_(1.0, norm_type).item()
        engine.zero_grad()  # as a loss scaler does, on all ranks, from the same norm
        engine.backward(square(engine, x))
        after = engine.clip_grad_norm_(1e9, norm_type).item()
        engine.step()
        found[make.__name__] = norm, after, equal(before, parameters_of(engine))
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_what_is_no_number_on_one_rank_is_seen_on_all(value, norm_type):
    first, second = launch(poisoned, 2, value, norm_type)
    for name, (norm, after, unchanged) in first.items():
        assert not math.isfinite(norm) and not math.isfinite(second[name][0])
        assert math.isfinite(after) and after == second[name][1] and not unchanged


def other_counts(comm, make, counts):
    engine = make(model_of("twice"), comm, FAST)
    for _ in range(counts[comm.rank]):
        engine.backward(square(engine, rows_of(comm, 0)))
    engine.step()


def other_order(comm, make):
    """Rank 1 looks at the norm before it steps, rank 0 does not."""
    engine = make(model_of("twice"), comm, FAST)
    engine.backward(square(engine, rows_of(comm, 0)))
    if comm.rank:
        engine.clip_grad_norm_(1.0)
    engine.step()


def one_forward_more(comm, make):
    engine = make(model_of("twice"), comm, FAST)
    for _ in range(1 + comm.rank):
        loss = square(engine, rows_of(comm, 0))
    engine.backward(loss)


def test_ranks_with_other_models_are_named():
    with pytest.raises(RankError, match=r"ranks \[1\] have another model than rank 0"):
        launch(lambda comm: Zero2(nn.Linear(4, 4 + comm.rank), comm, FAST), 2)


@pytest.mark.parametrize("make", ENGINES)
def test_ranks_with_another_number_or_order_of_calls_are_named(make):
    wrong = {
        "step of micro-batch 1 .*ward of micro-batch 1": (other_counts, make, (1, 2)),
        "ward of micro-batch 2 .*step of micro-batch 2": (other_counts, make, (3, 2)),
        "rank 0: step of micro-batch 1 in step 0; rank 1: clip_grad_norm_ of": (other_order, make)}
    if make is Zero3:
        wrong["rank 0: backward of micro-batch 0 in step 0; rank 1: forward of"] = one_forward_more, make
    for told, (fn, *args) in wrong.items():
        with pytest.raises(RankError, match=rf"ranks \[1\] are elsewhere than rank 0.*{told}") as caught:
            launch(fn, 2, *args)
        assert caught.value.ranks  # somebody is to blame


def test_in_the_other_stages_a_forward_is_nobody_elses_concern():
    """So a rank may try one more."""
    for make in (DataParallel, Zero1, Zero2):
        assert launch(one_forward_more, 2, make) == [None, None]


def test_one_element_on_four_ranks(tmp_path):
    def crowded(comm, folder):
        """One parameter of one element on four ranks: trained, saved and loaded by the next stage, trained again."""
        found = {}
        for stage, make in enumerate(ENGINES):
            engine = train(make(model_of("one small tensor"), comm, FAST), 2, width=1)
            engine.save(folder / f"{stage}")
            other = ENGINES[(stage + 1) % 4](nn.Linear(1, 1, bias=False), comm, FAST)
            other.load(folder / f"{stage}")
            for each in (engine, other):
                train(each, 1, 2, width=1)
            found[make.__name__] = parameters_of(engine), parameters_of(other), engine.state_dict(), other.state_dict()
            other.load_state_dict(found[make.__name__][2])
        return found

    first, *others = launch(crowded, 4, tmp_path)
    whole = first["DataParallel"][0]
    assert not equal(whole, {"weight": model_of("one small tensor").weight.detach()})
    for name, (ours, loaded, saved, told) in first.items():
        assert equal(ours, loaded) and differing(saved, told) == []
        assert all(equal(ours, other[name][0]) for other in others)
        torch.testing.assert_close(ours, whole)
