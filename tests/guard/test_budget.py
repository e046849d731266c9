"""A budget of memory: the peak of each step to the byte, what is counted, what the failure says, what is refused."""

import re

import pytest
import torch
from outside.models import SMALL, hf, text
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl import memory
from refimpl.guard.budget import Budget, OverBudget


def training(rows=(8, 16, 8)):
    """A function that makes one step for each number of rows, with what it trains made beforehand."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        for count in rows:
            model(torch.ones(count, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return train


def peak(run, **how):
    with Budget(2**50, **how) as budget:
        run()
    return budget.peak


def by_step(run):
    """The peaks of each step from the first forward on, as `memory.track` alone has them."""
    ends = []
    hook = register_optimizer_step_post_hook(lambda *_: ends.append(len(t.ops)))
    with memory.track() as t:
        run()
    hook.remove()
    rows = [t.first_call + 1, *(end + 1 for end in ends)]
    totals = t.timeline.totals
    return [int(totals[a:b].max()) for a, b in zip(rows, rows[1:], strict=False)]


@pytest.mark.parametrize("rows", [(8,), (64, 8, 8), (8, 256, 8), (8, 8, 256)])
def test_the_peak_is_the_tracker_s_of_the_highest_step_to_the_byte(rows):
    steps = by_step(training(rows))
    assert peak(training(rows)) == max(steps)
    with Budget(max(steps)):
        training(rows)()
    with pytest.raises(OverBudget, match=rf"^optimizer step {steps.index(max(steps)) + 1} \(AdamW\): {max(steps):,} "
                                         rf"bytes on cpu, 1 \(1 B\) more than {max(steps) - 1:,}\n"):
        with Budget(max(steps) - 1):
            training(rows)()


def llama(recompute):
    torch.manual_seed(0)
    model, batch = hf("ForCausalLM", "llama", recompute=recompute, **SMALL | {"num_hidden_layers": 6})(), text()()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return step


def test_recomputation_of_another_s_model_keeps_a_budget_and_a_mutant_that_saves_nothing_breaks_it():
    budget = peak(llama(recompute=False))
    assert budget == max(by_step(llama(recompute=False))) < max(by_step(llama(recompute=None)))
    with Budget(budget):
        llama(recompute=False)()
    with pytest.raises(OverBudget) as found, Budget(budget):
        llama(recompute=None)()
    by_line, by_module = str(found.value).partition("by line:\n")[2].split("\nby module:\n")
    assert "test_budget.py" in by_line and "model.layers" in by_module


def test_building_and_what_follows_the_last_step_are_counted_in_the_test_alone():
    def run(before, after):
        torch.empty(before)
        training()()
        torch.empty(after)

    step = peak(lambda: run(0, 0))
    assert peak(lambda: run(2**24, 0)) == peak(lambda: run(0, 2**24)) == step
    for sizes, where in (((2**24, 0), "building"), ((0, 2**24), "what no step ended")):
        assert peak(lambda sizes=sizes: run(*sizes), per="test") >= 2**26
        with pytest.raises(OverBudget, match=f"^the whole test, highest in {where}: .*\nafter empty in no module"):
            with Budget(2**26 - 1, per="test"):
                run(*sizes)


def test_between_steps_counts_for_the_step_that_follows():
    train = training((8,))
    with pytest.raises(OverBudget, match=r"^optimizer step 2 \(AdamW\): "), Budget("60 MiB"):
        train()
        torch.empty(2**24)
        train()


def test_without_an_optimizer_all_from_the_first_forward_on_is_one_step():
    model, taken = torch.nn.Linear(64, 64), 4 * (64 * 64 + 64) + 4 * 2 * 128 * 64
    with pytest.raises(OverBudget, match=f"^one step, since no optimizer stepped: {taken:,} bytes"), Budget("1KiB"):
        torch.empty(2**20)  # before it
        model(torch.ones(128, 64))


def test_the_ledger_is_that_of_the_moment():
    with pytest.raises(OverBudget) as found, Budget("1 KiB"):
        torch.empty(2**20)  # more than the step takes
        training((8,))()
    lines = str(found.value).splitlines()
    table = dict(re.findall(r"^([a-z ]+?)  +([0-9,]+)  ", "\n".join(lines), re.MULTILINE))
    numbers = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert table["parameters"] == table["gradients"] == f"{numbers:,}" and f" {table['total']} bytes" in lines[0]
    for rows in "\n".join(lines).partition("by line:\n")[2].split("by module:\n"):
        assert sum(int(row.split()[0].replace(",", "")) for row in rows.splitlines()) == peak(training((8,)))


@pytest.mark.parametrize(("limit", "bytes_"), [(4096, 4096), ("70 GiB", 70 * 2**30), ("70GiB", 70 * 2**30),
                                              ("512MiB", 2**29), ("4096", 4096)])
def test_a_limit_is_bytes_or_a_text(limit, bytes_):
    assert Budget(limit).limit == bytes_


@pytest.mark.parametrize("limit", ["70 GB", "", "-1GiB", 0, -5, 1.5, True, None, "nanGiB"])
def test_a_limit_that_is_no_size_is_named(limit):
    with pytest.raises(ValueError, match=f"^memory budget: .*{limit}.*: expected 24GiB"):
        Budget(limit)


@pytest.mark.parametrize("per", ["epoch", None, ["step"]])
def test_another_per_is_named(per):
    with pytest.raises(ValueError) as found:
        Budget(1, per)
    assert str(found.value) == f"memory budget with per={per!r}: expected 'step' or 'test'"


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("around", "name"), [
    (memory.track, "Tracker, a dispatch mode"), (Mode, "Mode, a dispatch mode"),
    (lambda: Budget(2**50), "another memory budget")])
def test_a_budget_within_what_sees_each_operation_is_refused(around, name):
    with around(), pytest.raises(RuntimeError, match=f"^a memory budget of 4,096 bytes begins within {name}: end"):
        Budget(4096).begin()
    assert peak(training((8,))) > 0  # nothing of it stays


def test_an_error_of_its_own_is_kept_and_the_peak_known():
    budget = Budget(1)
    with pytest.raises(ZeroDivisionError), budget:
        training((8,))()
        _ = 1 / 0
    assert budget.peak > 2**17 and budget.end() is None


def test_a_budget_of_nothing_is_kept():
    with Budget(1) as budget:
        pass
    assert budget.peak == 0
