"""Plans: segments, regions in regions, and the same keys."""

import copy
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.checkpointing import PlannedBlocks, checkpoint_sequential, planned, run_chain, segments_plan
from refimpl.checkpointing.chain import stages_of
from refimpl.model import GPT, GPTConfig


def chain(n, width=64):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh()) for _ in range(n)]


def run(how, n=9):
    functions, x = chain(n), torch.randn(128, 64, requires_grad=True)
    for function in functions:
        for p in function.parameters():
            p.grad = torch.zeros_like(p)
    with memory.track(x, functions) as t:
        how(functions, x).sum().backward()
    return [x.grad, *(p.grad for f in functions for p in f.parameters())], t.peak.total - t.start.total


def plain(functions, x):
    for function in functions:
        x = function(x)
    return x


@pytest.mark.parametrize("plan", [
    [0, 1, 2, 3], [(0, 1, 2, 3)], [(0, 1), (2,), 3], [((0, 1), 2), 3], [(((0,), 1), 2), 3], [0, ((1,), (2,), 3)]])
def test_any_plan_gives_the_same_gradients(plan):
    expected, _ = run(plain, 4)
    found, _ = run(lambda functions, x: run_chain(functions, plan, x), 4)
    assert all(map(torch.equal, found, expected))


def test_the_least_is_at_root_n_segments_for_what_a_function_keeps_in_inputs():
    """The mutant is one segment: it recomputes nothing and saves nothing."""
    (expected, whole), peaks = run(plain), {}
    for segments in range(1, 10):
        found, peaks[segments] = run(lambda functions, x, k=segments: checkpoint_sequential(functions, k, x))
        assert all(map(torch.equal, found, expected))
    assert peaks[1] == whole and peaks[5] < 0.4 * whole
    assert abs(min(peaks, key=peaks.get) - math.sqrt(9 * 3)) < 1, "three tensors kept for each input"


def test_other_arguments_go_to_every_function():
    def scaled(x, factor, *, shift):
        return x.sin() * factor + shift
    x = torch.randn(4, requires_grad=True)
    y = checkpoint_sequential([scaled] * 5, 2, x, torch.tensor(2.0), shift=1)
    assert torch.equal(y, run_chain([scaled] * 5, range(5), x, torch.tensor(2.0), shift=1))


@pytest.mark.parametrize(("n", "segments", "plan"), [
    (4, 1, [0, 1, 2, 3]), (4, 2, [(0, 1), 2, 3]), (5, 2, [(0, 1, 2), 3, 4]), (4, 4, [(0,), (1,), (2,), 3])])
def test_segments(n, segments, plan):
    assert segments_plan(n, segments) == plan and list(stages_of(plan)) == list(range(n))


def test_keywords_are_the_functions_own_in_every_region():
    def scaled(x, *, save):
        return x * save
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(checkpoint_sequential([scaled] * 3, 2, x, save=2.0), 8 * x)
    for run in (checkpoint_sequential, run_chain):
        with pytest.raises(TypeError, match="use_reentrant=False is an option of torch.utils.checkpoint: leave it out"):
            run([scaled] * 2, 2 if run is checkpoint_sequential else [0, 1], x, save=1.0, use_reentrant=False)


@pytest.mark.parametrize("segments", [0, -1, 5, 2.0, True, None])
def test_segments_out_of_range(segments):
    with pytest.raises(ValueError, match=f"segments={segments}: expected an integer from 1 to 4, the functions given"):
        checkpoint_sequential([torch.sin] * 4, segments, torch.ones(1))


@pytest.mark.parametrize("plan", [[0, 1], [0, 2, 1], [0, 1, 1, 2], [(0, 1, 2), 3]])
def test_a_plan_must_name_each_stage_once(plan):
    with pytest.raises(ValueError, match="expected 0 to 2, each once and in order"):
        run_chain([torch.sin] * 3, plan, torch.ones(1))
    with pytest.raises(ValueError, match="expected the blocks 0 to 2"):
        PlannedBlocks(chain(3), plan)


def test_blocks_of_a_model_run_by_a_plan():
    config = GPTConfig(vocab_size=64, context_length=64, layers=4, hidden=32, heads=4, dropout=0.1)
    model, tokens = GPT(config), torch.randint(0, 64, (2, 64))
    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        with memory.track(model, tokens) as t:
            model(tokens, tokens).backward()
        return [p.grad for p in model.parameters()], t.peak.total
    keys, (expected, whole), blocks = list(model.state_dict()), gradients(), model.blocks
    model.blocks = PlannedBlocks(blocks, [(0, 1), (2,), 3])
    found, peak = gradients()
    assert all(map(torch.equal, found, expected)) and peak < 0.7 * whole
    assert list(model.state_dict()) == keys and len(model.blocks) == 4 and model.blocks[3] is blocks[3]
    twin = copy.deepcopy(model)
    assert twin.blocks.plan == [(0, 1), (2,), 3] and twin.blocks[0] is not blocks[0]


def test_a_plan_for_a_while():
    model = GPT(GPTConfig(vocab_size=64, context_length=32, layers=4, hidden=32, heads=2))
    blocks = model.blocks
    with pytest.raises(ZeroDivisionError), planned(model, [(0, 1), 2, 3]):
        assert model.blocks.plan == [(0, 1), 2, 3]
        raise ZeroDivisionError
    assert model.blocks is blocks
    with pytest.raises(ValueError, match="each once and in order"), planned(model, [0, 2]):
        raise AssertionError
    assert model.blocks is blocks


def test_the_regions_of_a_plan_keep_their_inputs_as_keep_says():
    """And what cannot keep is refused by each of the ways to run one."""
    x, functions = torch.randn(8, requires_grad=True), [torch.sin, torch.cos, torch.tanh, torch.exp]
    (expected,) = torch.autograd.grad(run_chain(functions, [0, 1, 2, 3], x).sum(), x)
    for how in (lambda keep: run_chain(functions, [(0, 1), (2,), 3], x, keep=keep),
                lambda keep: checkpoint_sequential(functions, 3, x, keep=keep)):
        keep = Mock(**{"pack.side_effect": lambda tensor: (tensor.detach().clone(), None),
                       "unpack.side_effect": lambda kept, context: kept})
        assert torch.equal(torch.autograd.grad(how(keep).sum(), x)[0], expected)
        assert (keep.pack.call_count, keep.unpack.call_count) == (2, 2)
        with pytest.raises(TypeError, match="keep=3 has no method pack"):
            how(3)
    with pytest.raises(TypeError, match="keep=3 has no method pack"):
        PlannedBlocks([nn.Linear(2, 2)], keep=3)
