"""Autocast at stage 3: no unit that does not compute has casts of its weights; the numbers are those of stage 0."""

import functools
import unittest.mock

import pytest
import torch
from outside.models import GROUPED, causal, text
from rank_pool import on_ranks
from zero_kit import CONFIG, ENGINES, FAST, SGD, equal, gpt, own_rows, parameters_of, token_batches
from zero_steps import update

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.mixed_precision import autocast, autocast_activation_bytes, weight_cast_bytes
from refimpl.zero import Zero3
from refimpl.zero.internals.casts import Casts

REGIONS = {"ours": functools.partial(autocast, torch.bfloat16, "cpu"),
           "torch's": functools.partial(torch.autocast, "cpu", torch.bfloat16)}


def kept(region, steps=2):
    """Activations (bytes) between forward and backward, in each step."""
    engine, tokens, found = Zero3(gpt(), FakeCommunicator(0, 4), SGD, look_ahead=0), torch.zeros(2, 16).long(), []
    for _ in range(steps):
        with memory.track(engine.model, engine.optimizer, tokens) as t:
            with region():
                loss = engine.forward(tokens, tokens)
            found.append(t.now["activations"])
            engine.backward(loss)
            engine.step()
    return found


@pytest.mark.parametrize("region", REGIONS)
def test_casts_are_kept_of_the_unit_alone_with_which_backward_begins(region):
    """In the first step nobody knows yet which that is: it is released and gathered again."""
    alone = autocast_activation_bytes(CONFIG, 2, 16) - weight_cast_bytes(CONFIG, biases=False)
    assert kept(REGIONS[region]) == [alone, alone + 2 * CONFIG.vocab_size * CONFIG.hidden]
    with unittest.mock.patch.object(Casts, "release", lambda *_: None):
        assert kept(REGIONS[region]) == [autocast_activation_bytes(CONFIG, 2, 16)] * 2, "the mutant"


@pytest.mark.parametrize("region", REGIONS)
@on_ranks(2, device="cpu")
def test_the_numbers_are_those_of_stage_0(comm, region):
    found = []
    for make in ENGINES:
        engine, losses = make(gpt(), comm, FAST), []
        for tokens in token_batches(3)[:, 0]:
            with REGIONS[region]():
                mine = own_rows(comm, tokens)
                loss = engine.forward(mine, mine)
            update(engine, loss)
            losses.append(loss.item())
        found.append((losses, parameters_of(engine)))
        assert losses == found[0][0] and equal(found[-1][1], found[0][1])


@pytest.mark.parametrize("region", REGIONS)
def test_the_peak_of_a_step_of_a_llama(region):
    """Few rows: weights take nearly all. Without autocast activations are fp32, so that its peak is no lower bound."""
    def peak(region=None):
        torch.manual_seed(0)
        engine = Zero3(causal("llama", **GROUPED | {"num_hidden_layers": 6})(), FakeCommunicator(0, 64), SGD,
                       look_ahead=0)
        for _ in range(2):
            with memory.track(engine.model, engine.optimizer) as t:
                with REGIONS[region]() if region else torch.enable_grad():
                    loss = engine.forward(**text(1, 4)()).loss
                engine.backward(loss)
                engine.step()
                del loss
        return t.peak.total
    layer = max(sum(p.numel() for p in block.parameters()) for block in causal("llama", **GROUPED)().model.layers)
    ours = peak(region)
    assert ours <= peak() + 2 * layer
    with unittest.mock.patch.object(Casts, "release", lambda *_: None):
        assert peak(region) >= ours + 2 * 2 * layer, "the mutant"
