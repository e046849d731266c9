"""What a guard takes of a step, in pairs of stretches with and without it, in CPU seconds of the thread."""

import statistics
import time

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.model import GPT, GPTConfig

STRETCH = 10  # steps with a guard, between as many without


def steps(step, count):
    found = []
    for _ in range(count):
        begun = time.thread_time()
        step()
        found.append(time.thread_time() - begun)
    return found


def medians(step, folder, pairs=3):
    """Seconds of a step (without, with) a guard."""
    without, guarded = steps(step, STRETCH), []
    for _ in range(pairs):
        with memory.guard(folder):
            steps(step, 2)  # the first looks for models
            guarded += steps(step, STRETCH)
        without += steps(step, STRETCH)
    return statistics.median(without), statistics.median(guarded)


def training(model, x):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(*x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def mlp(width, layers):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.alone(only_rerun=AssertionError)
@pytest.mark.parametrize("layers", [4, 100])
def test_a_short_step_takes_two_milliseconds_more_at_most(layers, tmp_path):
    without, guarded = medians(training(mlp(32, layers), [torch.ones(4, 32)]), tmp_path)
    assert without < 0.1 and guarded - without <= 0.002, (without, guarded)


@pytest.mark.alone(only_rerun=AssertionError)
def test_a_long_step_takes_two_percent_more_at_most(tmp_path):
    without, guarded = medians(training(mlp(512, 8), [torch.ones(1024, 512)]), tmp_path, pairs=3)
    assert without >= 0.1 and guarded <= 1.02 * without, (without, guarded)


@pytest.mark.nightly
@pytest.mark.alone(only_rerun=AssertionError)
def test_a_step_of_124_million_parameters_takes_two_percent_more_at_most(tmp_path):
    tokens = torch.randint(0, 50257, (1, 32))
    without, guarded = medians(training(GPT(GPTConfig.named("gpt2")), [tokens, tokens]), tmp_path)
    assert without >= 0.1 and guarded <= 1.02 * without, (without, guarded)
