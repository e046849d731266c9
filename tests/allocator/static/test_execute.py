"""A step in its arena: the same bits, nothing live overwritten, departures named, little outside."""

import pytest
import torch
from static_kit import both, pair, same, shorter

from refimpl import memory
from refimpl.allocator import AllocationTrace, execute, plan_static, record_step, without_out
from refimpl.allocator.static import Arena, Lifetimes, StaticPlan


def planned(step, batch):
    """Record a step: (trace, plan, function that executes it in one arena)."""
    _, trace = record_step(step, *batch)
    plan = plan_static(trace)
    arena = Arena(plan.nbytes)
    return trace, plan, lambda *batch: execute(step, *batch, trace=trace, plan=plan, arena=arena)


@pytest.mark.parametrize(("name", "config"), [
    ("gpt", {}), ("gpt", {"dropout": 0.1}), ("gpt", {"options": {"foreach": True}}), ("llama", {}), ("convnext", {}),
    ("gpt", {"options": {"fused": True, "amsgrad": True}})])
def test_the_same_bits_step_after_step(name, config):
    model, step, other, plain, inputs = pair(name, **config)
    batch = inputs()
    torch.manual_seed(5)
    trace, plan, run = planned(step, batch)
    torch.manual_seed(5)
    plain(*batch)
    assert plan.nbytes <= 1.005 * plan.lower_bound + 64 * 20, "tiny tensors are rounded to 64 bytes"
    addresses = set()
    for seed in range(3):
        batch = inputs()
        found, loss = both(seed, run, plain, batch)
        assert found.departures == [] and torch.equal(found.result, loss) and same(model, other) and found.inside > 50
        addresses.add(tuple(p.grad.data_ptr() for p in model.parameters()))
        assert all(p.grad in found.arena for p in model.parameters())
        del found
    assert len(addresses) == 1, "gradients have the same buffers each time"


def test_gradients_share_memory_with_activations():
    """The mutant with a place for each block alone would take several times as much."""
    _, step, *_, inputs = pair()
    _, plan, _ = planned(step, inputs())
    assert plan.nbytes < 0.5 * plan.sizes.sum()


def test_outside_stands_at_most_the_largest_of_what_has_no_out():
    """Read from the allocator, which knows nothing of arenas."""
    _, step, *_, inputs = pair(layers=3, hidden=64)
    batch = inputs()
    trace, plan, run = planned(step, batch)
    listed = without_out(trace)
    largest = max(nbytes for _, nbytes in listed.values())
    assert {"native_layer_norm", "embedding_dense_backward"} <= set(listed) and "mm" not in listed
    run(*batch)
    with memory.measure() as inside:
        found = run(*batch)
    with memory.measure() as alone:
        step(*batch)
    assert found.most_outside <= largest and set(found.outside) <= set(listed)
    assert inside.peak <= largest + 4096, "and Python's scalars"
    assert alone.peak > 10 * inside.peak


def test_another_batch_size_is_noticed_and_runs_as_without_a_plan():
    model, step, other, plain, inputs = pair()
    batch = inputs()
    *_, run = planned(step, batch)
    plain(*batch)
    for rows, kinds in ((2, ["layout"]), (4, [])):
        found, loss = both(rows, run, plain, inputs(rows))
        assert torch.equal(found.result, loss) and same(model, other)
        assert [each.kind for each in found.departures] == kinds
        assert not kinds or "now [2, 32]" in str(found.departures[0]) and found.inside < 10
        del found


def test_another_order_is_noticed():
    a, b = torch.ones(8), torch.ones(8)
    *_, run = planned(lambda flag: (a.exp(), b.sin()) if flag else (b.sin(), a.exp()), (True,))
    found = run(False)
    assert found.departures[0].kind == "order" and "the plan has aten::exp here" in str(found.departures[0])
    assert torch.equal(found.result[0], b.sin()) and found.inside == 0 and run(True).departures == []


@pytest.mark.parametrize(("planned_for", "then", "kind", "text"), [
    (2, 3, "longer", "the plan ends after 2 operations"), (3, 2, "shorter", "the step ended after 2 of 3 operations")])
def test_a_step_of_another_length_is_noticed(planned_for, then, kind, text):
    x = torch.arange(8.0)
    def step(times):
        y = x
        for _ in range(times):
            y = y * 2
        return y
    *_, run = planned(step, (planned_for,))
    found = run(then)
    assert [each.kind for each in found.departures] == [kind] and text in str(found.departures[0])
    assert (found.departures[0].block, found.departures[0].nbytes) == (None, 0), "of an occupied place alone"
    assert torch.equal(found.result, step(then))


def test_a_tensor_that_lives_longer_than_planned_is_noticed_and_stays_as_it_is():
    kept, x, keeps = [], torch.arange(64.0), False
    def step():
        kept.clear()
        first = x * 2
        if keeps:
            kept.append(first)
        total = first.sum()
        del first
        return total, x * 3, x * 4
    *_, run = planned(step, ())
    assert run().departures == []
    keeps = True
    found = run()
    assert [(each.kind, each.nbytes) for each in found.departures] == [("occupied", 256)]
    assert "lives longer than planned; made outside of the arena" in str(found.departures[0])
    assert torch.equal(kept[0], x * 2) and torch.equal(found.result[1], x * 3) and torch.equal(found.result[2], x * 4)


def departures(planned):
    """Of a step whose plan is `planned(trace)`, a mutant: it is noticed and corrupts nothing."""
    model, step, other, plain, inputs = pair()
    batch = inputs()
    _, trace = record_step(step, *batch)
    plain(*batch)
    found, loss = both(3, lambda *batch: execute(step, *batch, trace=trace, plan=planned(trace)), plain, batch)
    assert len(found.departures) > 5 and torch.equal(found.result, loss) and same(model, other)
    return found.departures


def test_a_plan_with_lifetimes_too_short_is_noticed_and_corrupts_nothing():
    found = departures(lambda trace: plan_static(shorter(Lifetimes.of(trace), 1)))
    assert {each.kind for each in found} == {"occupied"}


def test_a_plan_with_overlaps_is_noticed_and_corrupts_nothing(monkeypatch):
    monkeypatch.setattr(StaticPlan, "check", lambda self: None)
    def squeezed(trace):
        good = plan_static(trace)
        return StaticPlan(good.lifetimes, good.offsets // 2 // 64 * 64, good.sizes, 64)
    assert departures(squeezed)


def test_a_step_that_raises_can_be_run_again():
    x, raises = torch.ones(8), False
    def step():
        y = x * 2
        if raises:
            raise KeyError("data")
        return y + 1
    *_, run = planned(step, ())
    raises = True
    with pytest.raises(KeyError, match="data"):
        run()
    raises = False
    assert run().departures == [] and torch.equal(run().result, torch.full((8,), 3.0))


def test_what_cannot_be_executed_is_named():
    step = lambda: torch.ones(8) * 2  # noqa: E731
    _, trace = record_step(step)
    with pytest.raises(TypeError, match=r"trace is a AllocationTrace: expected the StepTrace of record_step"):
        execute(step, trace=AllocationTrace(trace.events, trace.blocks))
    _, other = record_step(lambda: torch.ones(800) * 2)
    with pytest.raises(ValueError, match="of smaller ones: expected plan_static"):
        execute(step, trace=other, plan=plan_static(trace))
    with pytest.raises(ValueError, match="expected 128 bytes on cpu"):
        execute(step, trace=trace, arena=Arena(64))
    assert "2 tensors in 128 bytes; 0 bytes or less outside" in repr(execute(step, trace=trace))
