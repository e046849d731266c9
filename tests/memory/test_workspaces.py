"""What kernels take inside operations, found by laying the two instruments over each other."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from refimpl import memory
from refimpl.memory.trace import Op, StorageRecord, Trace
from refimpl.memory.tracking.taking import NOT_COUNTED
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
    model, tokens = GPT(config, dtype=dtype), torch.randint(0, 256, (4, 128))
    optimizer = torch.optim.AdamW(model.parameters())
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


def encoder():
    with torch.no_grad():
        torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).eval()(torch.ones(8, 64, 64))


def recurrent():
    torch.nn.LSTM(32, 64)(torch.ones(16, 4, 32))[0].sum().backward()


def expanded_gelu():
    torch.nn.functional.gelu(torch.ones(64, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(("program", "names"), [
    (encoder, {"_transformer_encoder_layer_fwd"}), (recurrent, {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}),
    (expanded_gelu, {"gelu_backward"}), (lambda: torch.ones(999).sort(), {"sort"}),
    (lambda: torch.ones(9, 9, requires_grad=True).sum().backward(), set())])
def test_a_note_names_the_kernels_that_take_workspaces(program, names):
    program()
    with memory.track() as t, memory.measure("cpu") as m:
        program()
    said = [note for note in t.notes if note.startswith(NOT_COUNTED)]
    assert set(" ".join(said).partition("inside ")[2].partition(";")[0].split(", ")) - {""} == names
    assert {r.op for r in memory.with_workspaces(t, m).records if r.mark == WORKSPACE and r.nbytes >= 1024} == names


def step():
    return (torch.randn(100, 100) @ torch.randn(100, 100)).exp().sum()


def two_readings():
    """(trace, measurement) of two runs of the same code."""
    with memory.track() as t, memory.measure("cpu") as m:
        step()
    return t, m


def test_two_regions_are_told_apart_from_one():
    (first, of_first), (second, of_second) = two_readings(), two_readings()
    for t, m in ((first, of_first), (second, of_second)):
        for each in (t, pickle.loads(pickle.dumps(t))):
            assert memory.with_workspaces(each, m).peak.total == m.peak
    for t, m in ((first, of_second), (second, of_first)):
        with pytest.raises(ValueError, match=r"of two regions: 1\d\d\.\d KiB of what the trace saw is not"):
            memory.with_workspaces(t, m)


def test_a_region_that_is_larger_on_one_side_is_refused():
    with memory.measure("cpu") as m:  # longer at its beginning, and at its end
        step()
        with memory.track() as t:
            step()
        step()
    with pytest.raises(ValueError, match="0 B of what the trace saw .* 31.* KiB of the log was taken outside"):
        memory.with_workspaces(t, m)
    with memory.track() as t:
        step()
        with memory.measure("cpu") as m:
            step()
        step()
    with pytest.raises(ValueError, match="31.* KiB of what the trace saw .* 0 B of the log"):
        memory.with_workspaces(t, m)


def test_either_instrument_may_be_the_outer_one():
    with memory.measure("cpu") as m, memory.track() as t:
        step()
    assert memory.with_workspaces(t, m).peak.total == m.peak


def test_memory_that_no_allocator_gave_is_no_other_region():
    with memory.track() as t, memory.measure("cpu") as m:
        torch.frombuffer(bytearray(10**6), dtype=torch.uint8)
        step()
    assert memory.with_workspaces(t, m).peak["temporaries"] == t.peak["temporaries"]


def log_of(*events):
    """A measurement whose log is written by hand."""
    return SimpleNamespace(events=list(events))


def test_what_lies_between_two_operations_belongs_to_the_later_one():
    """The log by hand, on a trace by hand: operations end at 10, 20 and 30; the last one returns nothing."""
    ops = [Op("a", "forward", "", 10), Op("b", "backward", "m", 20), Op("c", "step", "", 30)]
    records = [StorageRecord("cpu", "a", "forward", "", 0, 100), StorageRecord("cpu", "b", "backward", "m", 1, 50)]
    trace = Trace(ops, records, [(0, 0, 100), (1, 1, 50)], first_call=0, began_ns=1)
    log = log_of((2, 100), (3, 30), (9, -30), (11, 7), (12, 50), (19, -7), (20, 64), (29, -64))
    both = memory.with_workspaces(trace, log)
    assert [(r.op, r.phase, r.module, r.nbytes) for r in both.records if r.mark == WORKSPACE] == [
        ("a", "forward", "", 30), ("b", "backward", "m", 7), ("c", "step", "", 64)]
    assert [moment.ledger.total for moment in both.timeline] == [0, 130, 157, 214, 150]
    assert (both.first_call, both.began_ns, both.device) == (0, 1, "cpu")
    assert len(trace.records) == 2 and len(trace.events) == 2
    # What was there before is no measure for what may be missing.
    trace = Trace(ops, [*records, StorageRecord("cpu", "(start)", "forward", "", -1, 10_000)],
                  [(-1, 2, 10_000), *trace.events], began_ns=1)
    for said, *events in (("50 B of what the trace saw", (2, 100), (21, -1)),  # b ended when the log had nothing of it
                          ("100 B of what the trace saw", (12, 50)), ("150 B of what the trace saw",),
                          ("0 B of what the trace saw .* 2 B of the log", (0, 2), (2, 100), (12, 50)),
                          ("2 B of the log", (2, 100), (12, 50), (30, 2))):
        with pytest.raises(ValueError, match=said):
            memory.with_workspaces(trace, log_of(*events))
    assert memory.with_workspaces(trace, log_of((0, 1), (2, 100), (12, 50))).peak.total == 10_150  # within a hundredth


def test_what_lies_on_a_gpu_is_not_asked_of_the_cpus_log():
    ops = [Op("a", "forward", "", 10)]
    records = [StorageRecord("cuda:0", "a", "forward", "", 0, 100), StorageRecord("cpu", "a", "forward", "", 0, 8)]
    trace = Trace(ops, records, [(0, 0, 100), (0, 1, 8)])
    both = memory.with_workspaces(trace, log_of((2, 8), (3, 4), (4, -4)))
    assert trace.device == "cuda:0" and both.device == "cpu" and both.peak == {"temporaries": 8, WORKSPACE: 4}


def test_a_measurement_without_a_log_is_refused():
    with memory.track() as t:
        pass
    with pytest.raises(ValueError, match="CUDAMeasurement has no log"):
        memory.with_workspaces(t, memory.allocator.CUDAMeasurement.__new__(memory.allocator.CUDAMeasurement))
