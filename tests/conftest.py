"""What several tests share: a small GPT, and a step to train it."""

import importlib.util
import os

import pytest
import torch

# Triton decides when it is imported, by anything at all: without a GPU its kernels are run by its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import quick_interpreter

    quick_interpreter.quicken()

from refimpl.model import GPT, GPTConfig

# On a busy machine threads that wait for each other take a hundred times as long as one that does all the work.
torch.set_num_threads(1)

SMALL = GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=32, heads=4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def trained():
    """(model, optimizer, step): `step()` is one forward, backward and AdamW step on 2×32 tokens."""
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 32))

    def step():
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
