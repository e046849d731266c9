"""The meter on a CUDA device: the tracker beside what the caching allocator was asked for, and the rest itemised."""

import threading
import weakref

import pytest
import torch
from families import LLAMA, NEOX

from benchmarks import compare
from benchmarks.meter import Size, TrainingStep, byte_rows, release_workspaces
from refimpl import memory
from refimpl.memory import Tracker
from refimpl.model import GPT, GPTConfig

# Few large operations: some GiB of activations, beside which a workspace of 32 MiB is within 1 %.
SIZE = Size(layers=4, hidden=2048, heads=16, vocab_size=8192, batch=4, sequence=1024)
SHAPE = {"vocab_size": 256, "context_length": 256, "layers": 2, "hidden": 256, "heads": 4}
CONFIGS = {"gpt2": SHAPE, "llama": SHAPE | LLAMA | {"mlp_hidden": 704}, "neox": SHAPE | NEOX}
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("clean")


# --- bytes -----------------------------------------------------------------------------------------------------------


def check_agreement(step, tracker_type=Tracker):
    """One step under each alone: the peak within 1 % of the requested bytes, the net equal to the byte."""
    with memory.measure("cuda") as m:
        step()
    with tracker_type(step.model, step.optimizer, step.tokens) as t:
        step()
    assert abs(t.peak.total - t.start.total - m.peak) <= 0.01 * m.peak
    assert t.now.total - t.start.total == m.net
    return t


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_peak_and_net_are_what_the_allocator_was_asked_for(dtype, dropout):
    step = TrainingStep(SIZE, dtype, dropout, "cuda")
    step()  # from here on cuBLAS has its workspaces, and they are in neither reading
    t = check_agreement(step)
    assert t.peak["activations"] > 2**30


@pytest.mark.bytes
def test_the_first_step_keeps_optimizer_state_and_workspaces_and_nothing_else():
    step = TrainingStep(SIZE, device="cuda")
    count = step.model.config.parameter_count()
    with memory.measure("cuda") as m:
        step()
    assert m.net - 8 * count == release_workspaces() > 0
    step = TrainingStep(SIZE, device="cuda")
    with memory.track(step.model, step.optimizer, step.tokens) as t:
        step()
    assert t.now.total - t.start.total == t.now["optimizer state"] == 8 * count  # the step counters are on the CPU
    assert t.on("cpu").now == {"optimizer state": 4 * len(list(step.model.parameters()))}


@pytest.mark.bytes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_difference_has_a_name(dtype):
    net, requested, blocks, segments, driver = byte_rows(SIZE, dtype, 0.1, "cuda")
    assert net["items"]["unknown"] == 0 and requested["items"]["cuBLAS workspaces"] > 0
    assert abs(requested["items"]["inside kernels"]) <= 0.01 * requested["peer_value"]
    assert requested["items"]["older and unknown to the tracker"] >= 0
    assert 0 < blocks["items"]["rounding to 512 B"] < 2**20
    assert blocks["items"]["ends of blocks too small to split off"] >= 0
    for row in (net, requested, blocks, segments, driver):
        assert row["value"] + sum(row["items"].values()) == row["peer_value"]
    assert requested["peer_value"] <= blocks["peer_value"] <= segments["peer_value"] <= driver["peer_value"]


@pytest.mark.bytes
def test_a_broken_tracker_does_not_agree():
    class NeverFrees(Tracker):
        def _freed(self, reference):
            self._alive.pop(reference.key, None)

    class BlindToOtherThreads(Tracker):
        def _freed(self, reference):
            if threading.current_thread() is threading.main_thread():
                super()._freed(reference)
            else:
                self._alive.pop(reference.key, None)

    step = TrainingStep(SIZE, device="cuda")
    step()
    for broken in (NeverFrees, BlindToOtherThreads):
        with pytest.raises(AssertionError):
            check_agreement(step, broken)


@pytest.mark.bytes
def test_tensors_freed_on_the_autograd_thread_are_followed():
    x = torch.randn(2**20, device="cuda", requires_grad=True)
    freed_on = []
    with memory.track(x) as t:
        y = x.exp()
        weakref.finalize(y.untyped_storage(), lambda: freed_on.append(threading.get_ident()))
        loss = y.sum()
        del y
        assert t.now["activations"] == 4 * 2**20
        loss.backward()
    assert len(freed_on) == 1 and freed_on[0] != threading.get_ident()
    assert t.now["activations"] == 0


# --- activations, optimizer ------------------------------------------------------------------------------------------


@pytest.mark.bytes
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_closed_form_is_what_autograd_keeps(name, dtype, dropout):
    """Masks of one byte, statistics in fp32, RMSNorm in one kernel: what differs from the CPU."""
    config = GPTConfig(**CONFIGS[name], dropout=dropout)
    model, tokens = GPT(config, dtype=dtype, device="cuda"), torch.randint(0, 256, (4, 128), device="cuda")
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
    assert loss.isfinite()
    assert t.now["activations"] == memory.activation_bytes(config, 4, 128, dtype, device="cuda")
    if dropout or name == "llama" or dtype is not torch.float32:
        assert t.now["activations"] != memory.activation_bytes(config, 4, 128, dtype, device="cpu")


@pytest.mark.bytes
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_takes_one_temporary_of_every_parameter_at_once(dtype):
    """On CUDA AdamW's default is `foreach`: √v of all parameters is there together, e·Ψ bytes; `fused` takes none."""
    temporaries = {}
    for name, options in {"default": {}, "one by one": {"foreach": False}, "fused": {"fused": True}}.items():
        step = TrainingStep(SIZE, dtype, device="cuda")
        step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-4, **options)
        step()
        step.model(step.tokens, step.tokens).backward()
        with memory.track(step.model, step.optimizer) as t, memory.measure("cuda") as m:
            step.optimizer.step()
        temporaries[name] = t.peak["temporaries"]
        assert abs(t.peak.total - t.start.total - m.peak) <= 2**20  # foreach's kernels take small tables
    count, largest = step.model.config.parameter_count(), max(p.numel() for p in step.model.parameters())
    assert temporaries["default"] == dtype.itemsize * count
    assert dtype.itemsize * largest <= temporaries["one by one"] <= 3 * dtype.itemsize * largest
    assert temporaries["fused"] <= 2**10


# --- dry run, time ---------------------------------------------------------------------------------------------------


def build_and_step(config, dtype, steps=2):
    model = GPT(config, dtype=dtype, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 128), device="cuda")
    for _ in range(steps):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.bytes
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_dry_run_reads_what_the_real_run_reads(name, dtype, dropout):
    config = GPTConfig(**CONFIGS[name], dropout=dropout)
    with memory.track() as real:
        build_and_step(config, dtype)
    before = torch.cuda.memory_allocated()
    dry = memory.dry_run(build_and_step, config, dtype)
    assert torch.cuda.memory_allocated() - before <= 512  # PyTorch makes one element to have a CUDA context
    assert real.device == dry.device == f"cuda:{torch.cuda.current_device()}"
    assert dry.peak == real.peak and dry.now == real.now
    for phase in ("build", "forward", "backward", "step"):
        assert dry.peak_moment(phase).ledger == real.peak_moment(phase).ledger, phase
        assert dry.top(10, phase=phase) == real.top(10, phase=phase)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tracked_step_takes_at_most_three_times_as_long(dtype):
    step = TrainingStep(SIZE, dtype, device="cuda")
    timing = compare({"tracked": step.tracked, "untracked": step}, rounds=9)
    assert timing.ratio("tracked", "untracked") <= 3, timing
