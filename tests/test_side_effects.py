"""Trials that the program around them does not see, and that leave nothing alive."""

import gc
import random

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from refimpl import memory
from refimpl.mlp import memory_efficient_mlps
from refimpl.side_effects import no_side_effects


def trial():
    """Operations that save their own outputs."""
    layer = nn.Linear(64, 64)
    layer(torch.randn(64, 64)).abs().exp().softmax(-1).max().backward()


def test_nothing_is_seen_and_nothing_stays():
    seen, kept = [], random.getstate()
    state = torch.get_rng_state()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: seen.append(given))
    try:
        with memory.track() as t, torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            with no_side_effects(), torch.enable_grad():
                trial()
    finally:
        handle.remove()
    assert not seen and t.peak.total == 0 and torch.equal(torch.get_rng_state(), state) and random.getstate() == kept
    with memory.track() as t:
        trial()
    assert t.peak.total > 0


@pytest.mark.parametrize("watched", [True, False])
def test_the_trials_of_feed_forward_layers_leave_no_tensor_alive(watched):
    """Trials are small, but there is one for each layer, and a hidden layer has its own size there."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=512, num_hidden_layers=2,
                                         num_attention_heads=4))
    gc.collect()
    before = alive()
    if watched:
        with memory.track(model) as t:
            first = t.now.total
            assert memory_efficient_mlps(model) == 2
            assert t.now.total == first
    else:
        assert memory_efficient_mlps(model) == 2
    gc.collect()
    assert alive() == before


def alive():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
