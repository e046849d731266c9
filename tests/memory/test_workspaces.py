"""What kernels take inside operations, found by laying the two instruments over each other."""

import pytest
import torch

from refimpl import memory
from refimpl.memory.workspaces import WORKSPACE, _workspace
from refimpl.model import GPT, GPTConfig


@pytest.mark.parametrize(("changes", "nbytes"), [
    ([], 0),
    ([100], 0),  # returned
    ([100, 50, -50], 50),  # returned, and a workspace
    ([50, 100, -50], 50),
    ([-1000, 100, 50, -50], 50),  # something older was freed first
    ([-1000], 0),
    ([30, -30, 80, -80], 80),  # one after the other
])
def test_a_workspace_is_what_rises_above_the_end(changes, nbytes):
    assert _workspace(changes) == nbytes


def test_the_kernel_that_took_it_is_named():
    x = torch.randn(256, 256)
    with memory.track(x) as t, memory.measure("cpu") as m:
        rows = torch.logsumexp(x, dim=1)
    both = memory.with_workspaces(t, m)
    assert both.peak[WORKSPACE] >= x.nbytes and both.peak.total - both.start.total == m.peak
    assert both.peak_moment().operation == "logsumexp"
    assert ("logsumexp", both.peak[WORKSPACE] + rows.nbytes) in both.top(by="operation")
    assert both.now == t.now and WORKSPACE not in t.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_them_a_training_step_reads_what_the_allocator_reads(dtype, dropout):
    """At this size a bf16 matrix product on a CPU may need a workspace of 2 % of the peak: nothing else is missing."""
    config = GPTConfig(vocab_size=256, context_length=128, layers=4, hidden=256, heads=4, dropout=dropout)
    model = GPT(config, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 128))
    for _ in range(2):
        with memory.track(model, optimizer, tokens) as t, memory.measure("cpu") as m:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    both = memory.with_workspaces(t, m)
    scalars = 64  # that kernels make of Python numbers, at a moment when both instruments look
    assert abs(both.peak.total - both.start.total - m.peak) <= scalars
    taken = {r.op for r in both.records if r.mark == WORKSPACE and r.nbytes > scalars}
    assert dtype is torch.float32 or taken <= {"mm", "addmm", "bmm", "native_layer_norm_backward", "sum"}


def test_a_measurement_without_a_log_is_refused():
    with memory.track() as t:
        pass
    with pytest.raises(ValueError, match="CUDAMeasurement has no log"):
        memory.with_workspaces(t, memory.allocator.CUDAMeasurement.__new__(memory.allocator.CUDAMeasurement))
