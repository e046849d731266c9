"""ActivationReuseOptimizer: a plan for each shape, one arena; what departs is recorded anew; results may be kept."""

import pytest
import torch
from static_kit import both, pair, same, trainer

from refimpl.allocator import ActivationReuseOptimizer


def test_a_training_has_the_same_bits():
    model, step, other, plain, inputs = pair(dropout=0.1)
    train = ActivationReuseOptimizer(step)
    for seed in range(6):
        loss, expected = both(seed, train, plain, inputs(4 if seed != 3 else 2))
        assert torch.equal(loss, expected) and same(model, other)
        assert (train.last is None) == (seed in (0, 1, 3)), "warm-up, recording, other shapes"
    assert not train.departures and train.last.inside > 100
    assert "times the most that is live" in repr(train) and "an arena of" in repr(train)


def test_shapes_have_plans_and_share_an_arena():
    model, step, other, plain, inputs = pair()
    train = ActivationReuseOptimizer(step)
    for turn in range(8):
        loss, expected = both(turn, train, plain, inputs(2 + 2 * (turn % 2)))
        assert torch.equal(loss, expected)
        if turn == 4:
            small, arena = train.plan.nbytes, train.arena
    assert same(model, other) and not train.departures
    assert train.arena is arena and arena.nbytes == train.plan.nbytes > 1.3 * small


def test_results_may_be_kept():
    _, step, inputs = trainer("gpt")
    train, batch = ActivationReuseOptimizer(step), inputs()
    kept = [train(*batch) for _ in range(5)]
    values = [loss.item() for loss in kept]
    kept.append(train(*batch))
    assert train.departures["occupied"] == 2, "two of each have places"
    assert [loss.item() for loss in kept[:5]] == values and len({*values}) == 5


def test_a_step_that_changes_is_recorded_anew():
    model, step, other, plain, inputs = pair(dropout=0.5)
    train, batch = ActivationReuseOptimizer(step), inputs()
    for turn in range(7):
        if turn == 4:
            model.eval()
            other.eval()
        loss, expected = both(turn, train, plain, batch)
        assert torch.equal(loss, expected) and same(model, other)
    assert train.departures == {"order": 1} and not train.last.departures


def test_a_tensor_that_outlives_the_call_gets_a_place_of_its_own():
    kept, x = [], torch.arange(64.0)
    def step():
        first = x * 2
        others = [x * 3, x * 4]
        total = others[0] + others[1]
        del others
        kept[:] = [first]
        return total + first.sum()
    train = ActivationReuseOptimizer(step, warmup=0)
    for turn in range(5):
        assert torch.equal(train(), x * 7 + 2 * x.sum()) and torch.equal(kept[0], x * 2), turn
    assert train.last.departures == [] or train.last.departures[0].nbytes == 256


def test_a_step_that_raises_leaves_the_plan():
    raises = []
    def step(x):
        y = x * 2
        if raises:
            raise KeyError(raises.pop())
        return y + 1
    train, x = ActivationReuseOptimizer(step), torch.ones(8)
    for _ in range(3):
        train(x)
    raises.append("data")
    with pytest.raises(KeyError, match="data"):
        train(x)
    assert torch.equal(train(x), torch.full((8,), 3.0)) and train.last.departures == []


def test_a_graph_needs_a_gpu():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device"):
            ActivationReuseOptimizer(print, graph=True)


def test_before_it_is_planned():
    assert repr(ActivationReuseOptimizer(print)) == "not planned yet"


def test_the_second_call_is_recorded_and_planned():
    train, planned = ActivationReuseOptimizer(lambda x: x * 2 + 1), []
    for _ in range(3):
        train(torch.ones(8))
        planned.append((train.plan is not None, train.last is not None))
    assert planned == [(False, False), (True, False), (True, True)]
