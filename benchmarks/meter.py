"""The meter beside its peers: bytes beside the allocator's, a tracked step beside a plain one, a dry run's cost.

Three questions: does the tracker read what the allocator gave out, and what is the difference made of; how much slower
is a step under it; how long does a model take that no single machine holds.
"""

import json
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.common.ledger import human
from refimpl.model import GPT, GPTConfig

from . import outside
from .record import CHECKOUT, row
from .runner import BAR_DELAY, compare, synchronize

BLOCK = 512  # bytes: the CUDA allocator's blocks are multiples of it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRY_SECONDS, DRY_BYTES = 10, 2 * 10**9  # what a dry run may take


@dataclass(frozen=True)
class Size:
    """The shape of a training step: `batch` sequences of `sequence` tokens through a GPT."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    batch: int
    sequence: int

    def config(self, dropout=0.0):
        """Return the GPTConfig."""
        return GPTConfig(vocab_size=self.vocab_size, context_length=self.sequence, layers=self.layers,
                         hidden=self.hidden, heads=self.heads, dropout=dropout)

    def __str__(self):
        return f"{self.layers} layers of {self.hidden}, {self.batch} x {self.sequence} tokens"


SMALL = Size(layers=2, hidden=32, heads=4, vocab_size=256, batch=2, sequence=32)
REALISTIC = {
    "cpu": Size(layers=4, hidden=256, heads=4, vocab_size=256, batch=4, sequence=128),
    "cuda": Size(layers=12, hidden=768, heads=12, vocab_size=50257, batch=4, sequence=1024),  # GPT-2 small
}


def size_of(device, size=None):
    """Return `size`, or the realistic one of a device."""
    return size or REALISTIC[torch.device(device).type]


def settings_of(size, rounds, **more):
    """Return what the settings of each bench of a GPT's step say."""
    return {"step": asdict(size), "rounds": rounds, "threads": torch.get_num_threads(), **more}


class TrainingStep:
    """A GPT, its AdamW and a batch of random tokens; a call makes one forward, backward and optimizer step."""

    def __init__(self, size, dtype=torch.float32, dropout=0.0, device="cpu"):
        self.config = size.config(dropout)
        self.model = GPT(self.config, dtype=dtype, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, size.vocab_size, (size.batch, size.sequence), device=device)

    def __call__(self):
        self.model(self.tokens, self.tokens).backward()
        self.update()

    def update(self):
        """Make the optimizer's step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tracked(self):
        """The same step under the tracker, which is returned."""
        with memory.track(self.model, self.optimizer, self.tokens) as t:
            self()
        return t


def run(device="cpu", size=None, models=("gpt3-175b", "llama2-7b"), rounds=15, programs=None):
    """All comparisons on `device`: (settings, rows). `size`, `programs`: in place of its realistic size and of all."""
    size = size_of(device, size)
    settings = {"small step": asdict(SMALL), "optimizer": "AdamW", "dry runs": list(models)}
    return settings_of(size, rounds, **settings), all_rows(size, device, models, rounds, programs)


def all_rows(size, device, models, rounds, programs=None):
    """Yield rows of bytes case by case, then of time step by step, then of dry runs model by model."""
    cases = [(name, dropout) for name in DTYPES for dropout in (0.0, 0.1)]
    for name, dropout in tqdm(cases, "bytes", delay=BAR_DELAY, leave=False):
        yield from byte_rows(size, name, dropout, device)
    for each, name in ((size, "fp32"), (size, "bf16"), (SMALL, "fp32")):
        yield time_row(each, name, device, rounds)
    for model in tqdm(models, "dry runs", delay=BAR_DELAY, leave=False):
        yield from dry_rows(model)
    if torch.device(device).type == "cpu":
        yield from outside.rows(rounds, programs)


# --- bytes -----------------------------------------------------------------------------------------------------------


def byte_rows(size, dtype, dropout, device):
    """Peak and net of one step (not the first), as the tracker and as the allocator read them.

    The CPU's allocator tells bytes above the start of the step; CUDA's peaks are absolute.
    """
    step = TrainingStep(size, DTYPES[dtype], dropout, device)
    step()  # libraries are loaded and the optimizer's state is there
    case = f"{dtype}, dropout {dropout}"
    if torch.device(device).type == "cuda":
        return cuda_byte_rows(step, case, device)
    with memory.measure(device) as m:  # alone: a run that nothing else watches
        step()
    t = step.tracked()
    with memory.measure(device) as beside, memory.track(step.model, step.optimizer, step.tokens) as again:
        step()
    peer = "allocator alone, bytes asked for"
    items = {"kernel workspace": memory.with_workspaces(again, beside).peak.total - again.peak.total}
    return [byte_row(f"tracker's peak above the start, {case}", t.peak.total - t.start.total, peer, m.peak, items,
                     at=where(t)),
            byte_row(f"tracker's net, {case}", t.now.total - t.start.total, peer, m.net)]


def cuda_byte_rows(step, case, device):
    """The rows of a CUDA device: each peer counts something more than the one before."""
    step()  # cuBLAS has a workspace for forward's thread and one for backward's: both are there at each peak now
    torch.cuda.empty_cache()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with memory.measure(device) as m:
        step()
    reserved_now = torch.cuda.memory_reserved()
    t = step.tracked()
    ours, peak, net = t.peak.total, f"tracker's peak, {case}", t.now.total - t.start.total
    rows = [byte_row(f"tracker's net, {case}", net, "allocator alone, bytes asked for", m.net, {})]
    items = {"cuBLAS workspaces": release_workspaces()}
    items["older and unknown to the tracker"] = requested - sum(items.values()) - t.start.total
    rows.append(byte_row(peak, ours, "allocator alone, bytes asked for", m.requested, items, "inside kernels",
                         at=where(t)))
    items = {**rows[-1]["items"], "rounding to 512 B": rounding(t)}
    rows.append(byte_row(peak, ours, "allocator alone, blocks given", m.allocated, items,
                         "ends of blocks too small to split off"))
    rows.append(byte_row(peak, ours, "allocator alone, segments reserved", m.reserved, rows[-1]["items"],
                         "free in segments"))
    rows.append(byte_row(f"reserved at the end, {case}", reserved_now, "driver, in use on the device", m.driver,
                         rest="CUDA context, kernels, other processes"))
    return rows


def where(trace):
    """The operation and phase of the peak."""
    moment = trace.peak_moment()
    return f"{moment.operation}, {moment.phase}"


def byte_row(what, ours, peer, theirs, named=None, rest="unknown", **more):
    """A row in bytes whose difference is itemised: the `named` items, and what is left under the name `rest`."""
    named = named or {}
    return row(what, peer, "bytes", ours, theirs, **more, items={**named, rest: theirs - ours - sum(named.values())})


def release_workspaces():
    """Make cuBLAS give its workspaces back, and return the bytes that they were. It takes new ones when it needs them.

    A workspace belongs to a stream and a thread, and stays from the first matrix product on.
    """
    if not torch.cuda.is_initialized():
        return 0
    synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_stats()["requested_bytes.all.current"]


def rounding(trace, block=BLOCK):
    """Bytes that rounding each storage up to a multiple of `block` adds at the peak: Σ (−nbytes mod block)."""
    last, alive = trace.peak_moment().index, Counter()  # storage -> bytes
    for index, storage, delta in trace.events:
        if index + 1 <= last and trace.records[storage].device == trace.device:
            alive[storage] += delta
    return sum(-nbytes % block for nbytes in alive.values())


# --- time ------------------------------------------------------------------------------------------------------------


def time_row(size, dtype, device, rounds):
    """Seconds of a tracked step beside an untracked one, in alternation."""
    step = TrainingStep(size, DTYPES[dtype], device=device)
    timing = compare({"tracked": step.tracked, "untracked step": step}, rounds=rounds, title=f"steps of {size}")
    return timing.row(f"tracked step, {size}, {dtype}", "tracked", "untracked step")


# --- dry runs --------------------------------------------------------------------------------------------------------


def dry_rows(name):
    """Seconds and peak resident memory of a dry run of model `name` in a process of its own, beside their limits."""
    command = [sys.executable, "-m", "benchmarks.meter", name]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
    reading = json.loads(done.stdout)
    parameters, what = GPTConfig.named(name).parameter_count(), f"dry run of {name}"
    facts = {"parameters": parameters, "peak_bytes": reading["peak_bytes"], "first_use": reading["first_use"]}
    return [row(f"{what}, {human(reading['peak_bytes'])} at its peak", "limit", "s", reading["seconds"], DRY_SECONDS,
                **facts),
            row(f"{what}, peak resident memory", "limit", "bytes", reading["resident"], DRY_BYTES,
                growth=reading["growth"])]


def dry_step(name):
    """Build published model `name` in bf16 and make one forward, backward and AdamW step on one full sequence."""
    config = GPTConfig.named(name)
    model = GPT(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (1, config.context_length))
    model(tokens, tokens).backward()
    optimizer.step()


def dry_reading(name):
    """What a dry run of `name` takes of this process: seconds, and peak resident bytes at the end and above before.

    `first_use`: of the seconds, those in which PyTorch imports what fake tensors need.
    """
    before, start = peak_resident(), time.perf_counter()
    memory.dry_run(lambda: torch.ones(1) + 1)
    ready = time.perf_counter()
    trace = memory.dry_run(dry_step, name)
    seconds, after = time.perf_counter() - start, peak_resident()
    return {"seconds": seconds, "first_use": ready - start, "resident": after, "growth": after - before,
            "peak_bytes": trace.peak.total}


def peak_resident():
    """The most bytes of memory that this process has had resident so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; what getrusage tells there includes the process that started this one
        kibibytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kibibytes) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


if __name__ == "__main__":
    print(json.dumps(dry_reading(sys.argv[1])))
