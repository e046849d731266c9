"""Mixed precision beside PyTorch's: our autocast and loss scaler, `torch.autocast` and `torch.amp.GradScaler`.

There are three questions. Is our step as fast? Does it take no more memory? How do the recipes compare with fp32, in
bytes at the peak, bytes of model states, and seconds?
"""

from functools import partial

import torch
from tqdm import tqdm

from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer, autocast

from .meter import TrainingStep, settings_of, size_of
from .record import row
from .runner import BAR_DELAY, compare, peak

MOST_TIME = {"cpu": 1.10, "cuda": 1.05}  # the limits, as multiples of torch's time and peak
MOST_PEAK = 1.00
OURS, TORCH = "autocast and AdaptiveLossScaler", "torch.autocast and GradScaler"


class PrecisionStep(TrainingStep):
    """Makes training steps whose forward runs in `region()` and whose loss is scaled by `scaler`, if given."""

    def __init__(self, size, device, region, scaler=None, wrap=None):
        super().__init__(size, device=device)
        self.region, self.scaler = region, scaler
        self.optimizer = wrap(self.optimizer) if wrap else self.optimizer

    def __call__(self):
        with self.region():
            loss = self.model(self.tokens, self.tokens)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


def run(device="cpu", size=None, rounds=31):
    """Measure time and bytes of each recipe on `device`: (settings, rows). `size` replaces the device's realistic one.

    On a CPU only bf16 is measured, since few CPUs compute in fp16.
    """
    kind = torch.device(device).type
    size = size_of(device, size)
    dtypes = [torch.bfloat16] if kind == "cpu" else [torch.bfloat16, torch.float16]
    held = {"most time, of torch's": MOST_TIME[kind], "most peak": MOST_PEAK}
    return settings_of(size, rounds, optimizer="AdamW", **held), all_rows(size, device, dtypes, rounds)


def all_rows(size, device, dtypes, rounds):
    """Yield the rows of ours beside torch's, dtype by dtype, then those of the recipes."""
    for dtype in tqdm(dtypes, "dtypes", delay=BAR_DELAY, leave=False):
        yield from beside_torch(size, device, dtype, rounds)
    yield from recipes(size, device, rounds)


def pair(size, device, dtype):
    """Return {name: step}: our step in `dtype` and torch's, from the same initial weights."""
    kind = torch.device(device).type
    steps = {}
    for name, region, scaler in ((OURS, lambda: autocast(dtype, kind), AdaptiveLossScaler()),
                                 (TORCH, lambda: torch.autocast(kind, dtype), torch.amp.GradScaler(kind))):
        torch.manual_seed(0)
        steps[name] = PrecisionStep(size, device, region, scaler)
    return steps


def beside_torch(size, device, dtype, rounds):
    """Yield the row of a step's seconds, then that of the bytes at its peak, ours and torch's."""
    steps, name = pair(size, device, dtype), str(dtype).removeprefix("torch.")
    timing = compare(steps, rounds=rounds, title=f"steps in {name}")
    what = f"{OURS}, {name}, {size}"
    yield timing.row(f"step with {what}", OURS, TORCH, paired=timing.paired(OURS, TORCH),
                     limit=MOST_TIME[torch.device(device).type])
    peaks = {each: peak_of(step, device) for each, step in steps.items()}
    yield row(f"peak with {what}", TORCH, "bytes", peaks[OURS], peaks[TORCH], limit=MOST_PEAK)


def peak_of(step, device):
    """Return the peak in bytes above the start of a step that is not the first."""
    step()
    return peak(step, device)


def recipes(size, device, rounds):
    """Yield rows of each bf16 recipe beside fp32: the seconds of all, then of each one the bytes at the peak and of
    model states, by the tracker."""
    kind = torch.device(device).type
    off, low = partial(autocast, device_type=kind, enabled=False), partial(autocast, torch.bfloat16, kind)
    made = {"fp32": (off, None), "bf16 autocast": (low, None),
            "bf16 weights, fp32 masters": (off, MixedPrecisionOptimizer),
            "bf16 weights, fp32 masters and gradients": (off, partial(MixedPrecisionOptimizer, fp32_gradients=True))}
    steps = {name: PrecisionStep(size, device, region, wrap=wrap) for name, (region, wrap) in made.items()}
    timing = compare(steps, rounds=max(3, rounds // 3), title="recipes beside fp32")
    for name in list(made)[1:]:
        yield timing.row(f"step of {name}, {size}", name, "fp32")
    plain = steps.pop("fp32").tracked()
    for name, step in steps.items():
        t = step.tracked()
        yield row(f"peak of {name}", "fp32", "bytes", t.peak.total, plain.peak.total, items=dict(t.peak),
                  peer_items=dict(plain.peak))
        yield row(f"model states of {name}", "fp32", "bytes", states(t), states(plain))


def states(trace):
    """Return the bytes of parameters, gradients and optimizer state at the end of backward, when all exist."""
    *_, end = (moment for moment in trace.timeline if moment.phase == "backward")
    return sum(end.ledger[name] for name in ("parameters", "gradients", "optimizer state"))
