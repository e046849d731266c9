"""Traces of the training step in tests/kits/training_step.py, and the models that it trains."""

import families
import pytest
import torch
from training_step import ATTENTIONS, train

from refimpl import memory
from refimpl.model import GPT, GPTConfig

GPT2 = {"vocab_size": 300, "context_length": 1024, "layers": 3, "hidden": 64, "heads": 4}
LLAMA, NEOX = GPT2 | families.LLAMA | {"mlp_hidden": 176}, GPT2 | families.NEOX
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "neox": NEOX}


@pytest.fixture(scope="session")
def trace():
    """A function: the trace of a training step, by a dry run. Random states of regions are real ones, which fake
    tensors do not draw: then by a run."""
    def read(config, batch, sequence, recompute=False, **step):
        if recompute and config.dropout:
            with memory.track() as t:
                train(config, batch, sequence, recompute_blocks=True, **step)
            return t
        return memory.dry_run(train, config, batch, sequence, recompute_blocks=recompute, **step)
    return read


@pytest.fixture(scope="session")
def family():
    """A function: the config of a family, changed."""
    return lambda name, **changes: GPTConfig(**FAMILIES[name] | changes)


@pytest.fixture(scope="session")
def made():
    """A function: (model, tokens, targets); targets of a whole chunk and of parts of others are ignored."""
    def make(config, attention="dense", dtype=torch.float64, batch=2, length=50):
        torch.manual_seed(0)
        model = GPT(config, ATTENTIONS[attention], dtype=dtype)
        tokens, targets = torch.randint(0, 300, (2, batch, length))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        targets[:, 5:23] = -100
        return model, tokens, targets
    return make
