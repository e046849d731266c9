"""What a guard takes of a step, in pairs of stretches with and without it, in CPU seconds of the thread."""

import time

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.model import GPT, GPTConfig

STRETCH = 5  # steps with a guard, between as many without: short, so that a clock that drifts meets both


def steps(step, count):
    found = []
    for _ in range(count):
        begun = time.thread_time()
        step()
        found.append(time.thread_time() - begun)
    return found


def more(step, folder, pairs=6):
    """Seconds by which a step with a guard takes longer: the shortest of each, since others share the machine."""
    without, guarded = steps(step, STRETCH), []
    for _ in range(pairs):
        with memory.guard(folder):
            steps(step, 2)  # the first looks for models
            guarded += steps(step, STRETCH)
        without += steps(step, STRETCH)
    return min(guarded) - min(without)


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
def test_a_short_step_takes_two_milliseconds_more_at_most(tmp_path):
    assert more(training(mlp(32, 8), [torch.ones(4, 32)]), tmp_path) <= 0.002


@pytest.mark.alone(only_rerun=AssertionError)
def test_a_long_step_takes_two_percent_more_at_most(tmp_path):
    """What a guard does goes with modules and parameters, not with their size: it is read on a narrow twin, where it is
    not lost in the step's own wavering."""
    long = min(steps(training(mlp(512, 8), [torch.ones(1024, 512)]), 5))
    assert long >= 0.1 and more(training(mlp(1, 8), [torch.ones(1, 1)]), tmp_path) <= 0.02 * long


@pytest.mark.nightly
@pytest.mark.alone(only_rerun=AssertionError)
def test_a_step_of_124_million_parameters_takes_two_percent_more_at_most(tmp_path):
    tokens = torch.randint(0, 64, (1, 32))
    long = min(steps(training(GPT(GPTConfig.named("gpt2")), [tokens, tokens]), 3))
    twin = GPT(GPTConfig(64, 32, layers=12, hidden=12, heads=12))
    assert long >= 0.1 and more(training(twin, [tokens, tokens]), tmp_path) <= 0.02 * long
