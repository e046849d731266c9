"""The largest micro-batch: against every size tried one by one, and after running out of memory."""

import gc
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from refimpl import memory
from refimpl.accumulation import accumulate, find, find_micro_batch
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=64, context_length=8, layers=1, hidden=16, heads=2)
ROWS = 12


def step(rows):
    accumulate(torch.nn.Linear(16, 16), torch.ones(ROWS, 16), micro_batch=rows,
               loss_fn=lambda model, x: model(x).square().mean())


@pytest.fixture(scope="module")
def peak():
    """Rows → peak of `step`, each by a dry run of its own."""
    return {rows: memory.dry_run(step, rows).peak.total for rows in range(1, ROWS + 1)}


def test_it_is_the_largest_that_fits_to_the_byte(peak):
    for budget in sorted({nbytes + more for nbytes in peak.values() for more in (0, -1)})[1:]:
        found = find_micro_batch(step, ROWS, budget)
        assert found.micro_batch == max(rows for rows, nbytes in peak.items() if nbytes <= budget)
        assert found.nbytes == peak[found.micro_batch] and found.budget == budget and found.effective_batch == ROWS
        assert found.micro_batches == -(-ROWS // found.micro_batch)
        assert all(nbytes == peak[size] for size, nbytes in found.tried.items())


def test_more_rows_may_peak_lower_where_the_second_micro_batch_is_smaller(peak):
    """The first micro-batch has no gradients under it: 7 + 5 rows take less than 6 + 6, and 12 less than 11 + 1."""
    assert peak[5] < peak[6] > peak[7] and 4 * (16 * 16 + 16) > peak[6] - peak[7]


def test_only_divisors_if_parts_have_to_be_equal(peak):
    found = find_micro_batch(step, ROWS, peak[5], equal=True)
    assert found.micro_batch == 4 and set(found.tried) <= {1, 2, 3, 4, 6, 12}
    assert str(found).startswith("micro_batch=4: 12 rows = 3 × 4, peak ")
    assert "12 rows = 1 × 8 + 4" in str(find_micro_batch(step, ROWS, peak[8]))


def test_the_step_is_run_with_fakes_of_what_it_is_given():
    def gpt_step(rows, model, optimizer):
        tokens = torch.zeros(ROWS, 8, dtype=torch.int64)
        accumulate(model, tokens, tokens, micro_batch=rows)
        optimizer.step()
        optimizer.zero_grad()
    model = GPT(CONFIG)
    optimizer, before = torch.optim.SGD(model.parameters()), [parameter.clone() for parameter in model.parameters()]
    budget = memory.dry_run(gpt_step, 5, model, optimizer).peak.total
    assert find_micro_batch(gpt_step, ROWS, budget, model, optimizer).micro_batch == 5
    assert all(map(torch.equal, before, model.parameters())) and model.head.weight.grad is None
    with pytest.raises(ValueError, match="uses a real tensor that it was not given"):
        find_micro_batch(lambda rows: gpt_step(rows, model, optimizer), ROWS, budget)


def test_the_optimizer_sees_the_same_batch_whatever_is_found(peak):
    """The effective batch is constant: so are the gradient, and the step with the same learning rate."""
    stepped = []
    for budget in (peak[2], peak[5], peak[ROWS]):
        torch.manual_seed(0)
        model = GPT(CONFIG)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            tokens = torch.randint(0, 64, (ROWS, 8))
            accumulate(model, tokens, tokens, micro_batch=find_micro_batch(step, ROWS, budget).micro_batch)
            optimizer.step()
            optimizer.zero_grad()
        stepped.append(torch.cat([parameter.flatten() for parameter in model.parameters()]).detach())
    assert all((each - stepped[0]).norm() <= 1e-6 * stepped[0].norm() for each in stepped)


@settings(deadline=None)
@example([1] * 10, 2, 0, 6, False)  # peaks of 6 to 9 rows: 6, 7, 8, 9
@example([1] * 40, 30, 0, 35, False)  # of 21 to 39 rows: falling from 49 to 35, then rising
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(0, 200), st.integers(0, 100),
       st.integers(1, 400), st.booleans())
def test_the_search_finds_what_trying_all_finds(steps, gradients, constant, budget, equal):
    """Of a step whose first micro-batch takes `rows` and whose second has gradients under it."""
    batch, activations, peaks = len(steps), [sum(steps[:n]) for n in range(len(steps) + 1)], {}
    sizes = [n for n in range(1, batch + 1) if not equal or batch % n == 0]
    def peak(rows):
        second = min(rows, batch - rows)
        return max(constant, activations[rows], activations[second] + gradients if second else 0)
    def fits(index):
        peaks[sizes[index]] = peak(sizes[index])
        return peaks[sizes[index]] <= budget
    best = max((i for i, rows in enumerate(sizes) if peak(rows) <= budget), default=None)
    assert find._largest(sizes, fits, peaks) == best and len(peaks) <= 6 * len(sizes).bit_length() + 2


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), None, "8 GiB", True])
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match="budget=.*: expected bytes, a number above 0"):
        find_micro_batch(step, ROWS, budget)


@pytest.mark.parametrize("rows", [0, -1, 2.5, float("nan"), None, True])
def test_effective_batches_that_are_none(rows):
    with pytest.raises(ValueError, match="effective_batch=.*: expected an integer of at least 1"):
        find_micro_batch(step, rows, 1000)


def test_a_step_is_a_function():
    with pytest.raises(TypeError, match="step=8: expected a function"):
        find_micro_batch(8, 12, 1000)


def test_when_nothing_fits_the_error_says_the_least_need(peak):
    assert min(peak.values()) == peak[1]
    with pytest.raises(ValueError, match=f"of 1 row, needs {peak[1]:,} bytes, .*, and the budget is {peak[1] - 1:,}"):
        find_micro_batch(step, ROWS, peak[1] - 1)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_bar_writes_nothing_or_stays(monkeypatch, capsys, drawn):
    """A notebook would show an empty box for a bar that clears itself."""
    when = {"delay": 1e-9 if drawn else 1000, "mininterval": 0}
    monkeypatch.setattr(find, "tqdm", lambda **options: tqdm(**options | when))
    find_micro_batch(lambda rows: torch.ones(rows), 8, 16)
    shown = capsys.readouterr().err
    assert shown.endswith("\n") and shown.rpartition("\r")[2].startswith("micro-batches: 7it") if drawn else shown == ""


def test_what_the_step_raises_goes_through():
    for probe in (False, True):
        with pytest.raises(ZeroDivisionError):
            find_micro_batch(lambda rows: rows / 0, 12, 10**9, probe=probe, device="cpu")


@pytest.fixture
def quick_meter(monkeypatch):
    """A meter that reads nothing: the profiler, which is the CPU's, takes half a second to start."""
    class Meter(nullcontext):
        peak, reserved = 1, None
    monkeypatch.setattr(memory, "measure", lambda device: Meter())


class Device:
    """Has room for `rows` rows; a step that asks for more raises, and leaves tensors in frames, cycles and notes."""

    def __init__(self, rows):
        self.rows, self.alive, self.errors = rows, weakref.WeakSet(), []

    def make(self, rows):
        tensor = torch.ones(1000 * rows)
        self.alive.add(tensor)
        return tensor

    def step(self, rows):
        local, cycle = self.make(rows), {"tensor": self.make(rows)}
        cycle["self"] = cycle
        try:
            self.inner(rows)
        except torch.OutOfMemoryError as error:
            self.errors.append(error)  # a logger, say, that keeps what it was told
            raise RuntimeError(f"step failed, {local.shape}") from error

    def inner(self, rows):
        deeper = self.make(rows)
        if rows > self.rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {deeper.shape}")


def test_running_out_of_memory_is_survived_and_nothing_of_it_is_left(monkeypatch, quick_meter):
    monkeypatch.setattr(find, "is_out_of_memory", lambda error: isinstance(error.__cause__ or error,
                                                                           torch.OutOfMemoryError))
    gc.disable()  # what is freed is freed by the search
    try:
        device = Device(5)
        found = find_micro_batch(device.step, 20, 10**9, probe=True, device="cpu")
        assert found.micro_batch == 5 and found.micro_batches == 4
        assert found.tried == {**{n: found.tried[n] for n in (1, 2, 4)}, 8: None, 6: None, 5: found.nbytes}
        assert len(device.errors) == 2 and len(device.alive) == 0 and sys.exc_info() == (None, None, None)
    finally:
        gc.enable()


def test_a_search_that_forgets_nothing_is_seen(monkeypatch, quick_meter):
    monkeypatch.setattr(find, "is_out_of_memory", lambda error: True)
    monkeypatch.setattr(find, "_forget", lambda error: None)
    device = Device(2)
    find_micro_batch(device.step, 4, 10**9, probe=True, device="cpu")
    assert len(device.alive) > 0


def test_a_probe_keeps_to_the_budget_by_the_allocators_word():
    found = find_micro_batch(lambda rows: torch.ones(1000 * rows), 8, 4000 * 5, probe=True, device="cpu")
    assert found.micro_batch == 5 and found.nbytes == 20_000
    with pytest.raises(ValueError, match="the operating system kills a process that runs out of memory"):
        find_micro_batch(lambda rows: None, 64, None, probe=True, device="cpu")
    with pytest.raises(ValueError, match="cpu runs out of memory with a micro-batch of 1 row"):
        find_micro_batch(Device(0).inner, 64, 10**9, probe=True, device="cpu")


def test_exceptions_that_name_each_other_are_forgotten_once():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    find._forget(first)
    assert first.__traceback__ is second.__traceback__ is None


def test_random_numbers_after_it_are_those_without_it(quick_meter):
    state = torch.get_rng_state()
    find_micro_batch(lambda rows: torch.randn(rows), 2, 10**6, probe=True, device="cpu")
    find_micro_batch(lambda rows: torch.randn(rows), 4, 10**6)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("error", "verdict"), [
    (torch.OutOfMemoryError("CUDA out of memory."), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ValueError("DefaultCPUAllocator: can't allocate memory"), False)])
def test_which_errors_say_that_memory_is_out(error, verdict):
    assert find.is_out_of_memory(error) is verdict


def test_the_cpu_allocators_own_error_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert find.is_out_of_memory(caught.value)
