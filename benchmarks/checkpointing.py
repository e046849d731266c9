"""Recomputation beside torch.utils.checkpoint: time and peak of the same step, and the cost of each policy.

There are two questions. Is `refimpl.checkpointing` as fast and as small as its peer (a time ratio of 1.00 within 3 % of
noise, a peak ratio of at most 1.00)? How many bytes does each policy save beside a step without recomputation, and how
much slower is it?
"""

from dataclasses import asdict
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from tqdm import tqdm

from refimpl import checkpointing as ours
from refimpl.model import GPT

from .meter import DTYPES, SMALL, settings_of, size_of
from .record import row
from .runner import BAR_DELAY, compare, peak

TORCH = "torch.utils.checkpoint"
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def run(device="cpu", size=None, rounds=15):
    """Make all comparisons on `device`: (settings, rows). `size` replaces the device's realistic one."""
    size = size_of(device, size)
    settings = {"small step": asdict(SMALL), "a step": "forward and backward; gradients are there and added to",
                "held to": "time 1.00 within 3 %, peak 1.00"}
    return settings_of(size, rounds, **settings), all_rows(size, device, rounds)


def all_rows(size, device, rounds):
    """Yield the rows of ours beside torch's, pair by pair, then those of the policies."""
    cases = [(size, "fp32", 0.0), (size, "fp32", 0.1), (size, "bf16", 0.0), (SMALL, "fp32", 0.0)]
    for case in tqdm(cases, "beside torch", delay=BAR_DELAY, leave=False):
        yield from beside_torch(*case, device, rounds, pairs=("blocks",))
    yield from beside_torch(size, "fp32", 0.0, device, rounds, pairs=("segments", "save-list"))
    yield from policy_rows(size, device, rounds)


class Step:
    """Runs a GPT's forward and backward on random tokens."""

    def __init__(self, size, dtype="fp32", dropout=0.0, device="cpu"):
        self.config = size.config(dropout)
        torch.manual_seed(0)
        self.model = GPT(self.config, dtype=DTYPES[dtype], device=device)
        self.tokens = torch.randint(0, size.vocab_size, (size.batch, size.sequence), device=device)
        self.blocks, self.device = self.model.blocks, device

    def __call__(self):
        torch.manual_seed(1)
        self.model(self.tokens, self.tokens).backward()

    def peak(self):
        """Return the peak in bytes above the start of a step that is not the first."""
        self()
        return peak(self, self.device)


def beside_torch(size, dtype, dropout, device, rounds, pairs):
    """Yield the rows of each pair: the peak, then the time, ours and torch's in alternation on one model."""
    for pair in pairs:
        steps = {name: install(Step(size, dtype, dropout, device)) for name, install in PAIRS[pair].items()}
        gradients = [[p.grad for p in step.model.parameters()] for step in steps.values() if step() is None]
        assert all(map(torch.equal, *gradients)), f"{pair}: the gradients differ"
        what = f"{pair}, {size.layers} x {size.hidden}, {dtype}, dropout {dropout}"
        peaks = {name: step.peak() for name, step in steps.items()}
        yield row(f"peak: {what}", TORCH, "bytes", peaks["ours"], peaks[TORCH])
        timing = compare(steps, rounds=rounds, title=what)
        yield timing.row(f"time: {what}", "ours", TORCH, paired=timing.paired("ours", TORCH))


def policy_rows(size, device, rounds):
    """Yield rows of each policy beside the same step without recomputation: the peak and its closed form of each one,
    then the seconds of all."""
    n, plain = size.layers, Step(size, device=device)
    steps, peaks = {"none": plain}, {"none": plain.peak()}
    policies = {"every block": ([(i,) for i in range(n)], None),
                "every second block": ([(i,) if i % 2 == 0 else i for i in range(n)], None),
                "attention core": (None, "attention core"), "attention": (None, "attention"), "mlp": (None, "mlp")}
    for name, (plan, part) in policies.items():
        steps[name] = with_policy(Step(size, device=device), plan, part)
        peaks[name] = steps[name].peak()
        predicted = ours.gpt_peak_bytes(plain.config, size.batch, size.sequence, plan, part, device=device)
        yield row(f"peak: {name}", "no recomputation", "bytes", peaks[name], peaks["none"])
        yield row(f"predicted peak: {name}", "allocator", "bytes", predicted, peaks[name])
    timing = compare(steps, rounds=rounds, title="policies")
    for name in policies:
        saved, slower = 1 - peaks[name] / peaks["none"], timing.ratio(name, "none") - 1
        yield row(f"time: {name}", "no recomputation", "s", timing.median(name), timing.median("none"),
                  spread=timing.spread(name), return_on_time=ours.return_on_time(saved, slower))


def with_policy(step, plan, part):
    """Return `step` with its blocks run by `plan`, or with `part` of each block recomputed."""
    if part is not None:
        step.policy = ours.selective(step.blocks, part)
    else:
        step.model.blocks = ours.PlannedBlocks(step.blocks, plan)
    return step


# --- pairs: the same recomputation, ours and torch's -----------------------------------------------------------------


def _blocks(how, **options):
    """Return what recomputes every block of a step by `how`."""
    def install(step):
        step.policy = ours.Recomputing()
        for block in step.blocks:
            step.policy.add(block, how=how, **options)
        return step

    return install


def _segments(how):
    """Return what recomputes the blocks of a step in two segments by `how`."""
    def install(step):
        step.model.blocks = _One(lambda x, rotation: how([partial(block, rotation=rotation) for block in step.blocks],
                                                         2, x))
        return step

    return install


class _One(torch.nn.Module):
    """Takes the place of a list of blocks; a loop over it runs one function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def __iter__(self):
        yield self._function


TORCH_OPTIONS = {"use_reentrant": False}
PAIRS = {
    "blocks": {"ours": _blocks(ours.checkpoint), TORCH: _blocks(partial(torch_checkpoint, **TORCH_OPTIONS))},
    "segments": {"ours": _segments(ours.checkpoint_sequential),
                 TORCH: _segments(partial(torch_sequential, **TORCH_OPTIONS))},
    "save-list": {"ours": _blocks(ours.checkpoint, save=PRODUCTS), TORCH: _blocks(partial(
        torch_checkpoint, **TORCH_OPTIONS, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS)))}}
