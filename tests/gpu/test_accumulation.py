"""Accumulation on a CUDA device: bytes by the caching allocator, and micro-batches found by running out of memory."""

import gc

import pytest
import torch

from benchmarks.meter import release_workspaces
from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_bytes, find_micro_batch
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=4096, context_length=512, layers=4, hidden=512, heads=8)
LENGTH = 512
pytestmark = pytest.mark.usefixtures("clean")


def tokens_of(rows):
    return torch.randint(0, CONFIG.vocab_size, (rows, LENGTH), device="cuda")


def step_of(model, optimizer, tokens, rows):
    accumulate(model, tokens, tokens, micro_batch=rows)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_the_gradient_is_that_of_the_whole_ragged_batch(dtype, within):
    model, tokens = GPT(CONFIG, dtype=dtype, device="cuda"), tokens_of(8)
    targets = tokens.clone()
    for row in range(8):
        targets[row, [512, 3, 100, 0, 17, 1, 300, 40][row]:] = -100
    loss = model(tokens, targets)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert torch.isclose(accumulate(model, tokens, targets, micro_batch=3), loss.detach(), rtol=1e-3)
    for parameter, each in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad.double() - each.double()).norm() <= within * each.double().norm() + 1e-9


@pytest.mark.bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_the_closed_forms_whatever_the_number_of_micro_batches(dtype):
    model = GPT(CONFIG, dtype=dtype, device="cuda")
    optimizer, readings = torch.optim.AdamW(model.parameters(), fused=True), {}
    step_of(model, optimizer, tokens_of(4), 2)
    for parts in (2, 4, 8):
        tokens = tokens_of(2 * parts)
        with memory.track(model, optimizer, tokens) as t, memory.measure("cuda") as m:
            step_of(model, optimizer, tokens, 2)
        above_start = t.peak.total - t.start.total
        assert abs(above_start - m.peak) <= 0.01 * m.peak
        readings[parts] = above_start
    activations = memory.activation_bytes(CONFIG, 2, LENGTH, dtype, device="cuda")
    held = accumulation_bytes(CONFIG.parameter_count(), activations, 2, gradient=dtype).total
    logits = 4 * 2 * LENGTH * CONFIG.vocab_size
    assert abs(readings[2] - held - 2 * logits) <= 0.01 * held
    assert max(readings.values()) - min(readings.values()) <= 64


@pytest.mark.bytes
def test_low_precision_gradients_do_not_pile_up():
    model, tokens = GPT(CONFIG, dtype=torch.bfloat16, device="cuda"), tokens_of(4)
    with memory.track(model, tokens) as t:
        accumulate(model, tokens, tokens, micro_batch=2)
    column, count = t.timeline.categories.index("gradients"), CONFIG.parameter_count()
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    assert 4 * count < t.timeline.nbytes[:, column].max() <= 4 * count + 2 * largest
    assert t.now["gradients"] == 2 * count


# --- out of memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_device(cuda):
    """The device with room for about 3 GiB more than is there, so that running out of memory does not take long."""
    total = torch.cuda.get_device_properties(cuda).total_memory
    room = torch.cuda.memory_reserved() + 3 * 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    yield room
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.bytes
def test_a_probe_runs_out_of_memory_and_recovers(small_device):
    model = GPT(CONFIG, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    step_of(model, optimizer, tokens_of(2), 1)
    gc.collect()
    release_workspaces()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    found = find_micro_batch(lambda rows: step_of(model, optimizer, tokens_of(3 * rows), rows), 512, None, probe=True)
    assert None in found.tried.values(), "nothing ran out of memory: the device was not small"
    assert found.tried.get(found.micro_batch + 1, 0) is None and found.nbytes <= small_device
    release_workspaces()
    assert torch.cuda.memory_allocated() <= before and all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.cuda.get_rng_state())
    step_of(model, optimizer, tokens_of(3 * found.micro_batch), found.micro_batch)  # and it does run


@pytest.mark.bytes
def test_a_probe_keeps_to_a_budget_below_the_device():
    model = GPT(CONFIG, device="cuda")

    def step(rows):
        tokens = tokens_of(3 * rows)
        accumulate(model, tokens, tokens, micro_batch=rows)
        model.zero_grad()

    budget = 2 * 2**30
    found = find_micro_batch(step, 64, budget, probe=True)
    assert found.nbytes <= budget < found.tried[found.micro_batch + 1]


@pytest.mark.bytes
def test_a_dry_run_says_what_the_probe_says_but_for_segments_and_workspaces():
    def step(rows):
        model = GPT(CONFIG, device="cuda")
        tokens = tokens_of(3 * rows)
        accumulate(model, tokens, tokens, micro_batch=rows)

    dry = find_micro_batch(step, 64, 2 * 2**30)
    probed = find_micro_batch(step, 64, 2 * 2**30, probe=True)
    assert 0 <= dry.micro_batch - probed.micro_batch <= 0.2 * dry.micro_batch + 1


@pytest.mark.bytes
def test_one_row_that_is_too_much(small_device):
    def step(rows):
        torch.empty(rows * 2**42, dtype=torch.uint8, device="cuda")

    with pytest.raises(ValueError, match="cuda runs out of memory with a micro-batch of 1 row"):
        find_micro_batch(step, 8, None, probe=True)


@pytest.mark.bytes
def test_out_of_memory_in_the_middle_of_a_step_leaves_no_gradient(small_device):
    model = GPT(CONFIG, dtype=torch.bfloat16, device="cuda")
    parts = [tokens_of(1), tokens_of(1), tokens_of(2048)]
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        accumulate(model, micro_batches=[(part, part) for part in parts])
    gc.collect()
    release_workspaces()
    assert torch.cuda.memory_allocated() <= before
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
