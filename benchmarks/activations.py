"""Compressed and offloaded activations, beside a step that keeps them whole and beside PyTorch's own methods.

There are four questions. What does each method save at the peak and cost in time, with `torch.utils.checkpoint` in the
same run? Is our offload as fast and as small as `torch.autograd.graph.save_on_cpu`? How large is the error of the
gradients, beside that of `torch.autocast`? Which loss does training reach?
"""

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from tqdm import tqdm

from refimpl import memory
from refimpl.activations import compress_activations, compressed_activation_bytes, offload_activations
from refimpl.data import TextData
from refimpl.model import GPT

from .checkpointing import TORCH as CHECKPOINT
from .checkpointing import TORCH_OPTIONS, Step
from .meter import DTYPES, SMALL, settings_of, size_of
from .record import row
from .runner import BAR_DELAY, compare

WAYS = {"lossless": {"method": "lossless"}, "bf16": {"method": "bf16"}, "int8": {"method": "int8"},
        "int8, stochastic": {"method": "int8", "stochastic": True}}
NOTHING, SAVE_ON_CPU = "uncompressed", "save_on_cpu"
YARDSTICK = "uncompressed, weights 0.1 % off"
LEARNING_RATE, LAST = 1e-3, 20  # the final loss of a training run is the mean of its LAST losses


def run(device="cpu", size=None, rounds=15, steps=300):
    """Make all comparisons on `device`: (settings, rows).

    `size` replaces the device's realistic one. `steps`: the number of steps in the training run.
    """
    size = size_of(device, size)
    settings = {"training": {**asdict(SMALL), "steps": steps, "learning rate": LEARNING_RATE},
                "a step": "forward and backward; gradients are there and added to"}
    return settings_of(size, rounds, **settings), all_rows(size, device, rounds, steps)


def all_rows(size, device, rounds, steps):
    """Yield the rows of compression case by case, then of the offload, of gradients and of training."""
    for case in tqdm([("fp32", 0.0), ("fp32", 0.1), ("bf16", 0.0)], "compression", delay=BAR_DELAY, leave=False):
        yield from compression_rows(size, *case, device, rounds)
    yield from offload_rows(size, device, rounds)
    yield from gradient_rows(size, device)
    yield from training_rows(steps, device)


def unchanged(model):
    """Return a context that changes nothing."""
    return nullcontext()


class CompressedStep(Step):
    """Runs a GPT's forward in `context(model)`, and its backward."""

    def __init__(self, size, dtype, dropout, device, context):
        super().__init__(size, dtype, dropout, device)
        self.context = context

    def __call__(self):
        self.loss().backward()

    def loss(self):
        """Return the loss of a forward, with the same dropout masks each time."""
        torch.manual_seed(1)
        with self.context(self.model):
            return self.model(self.tokens, self.tokens)

    def kept(self):
        """Return the bytes of activations between forward and backward, as the tracker reads them on the device."""
        with memory.track(self.model, self.tokens) as t:
            loss = self.loss()
        del loss
        return t.now["activations"]


def compression_rows(size, dtype, dropout, device, rounds):
    """Yield rows for each method, and for recomputation, beside the same step without: the seconds of all, then for
    each one the peak and the bytes kept."""
    make = partial(CompressedStep, size, dtype, dropout, device)
    steps = {NOTHING: make(unchanged), **{name: make(partial(compress_activations, **options))
                                          for name, options in WAYS.items()}, CHECKPOINT: make(unchanged)}
    for block in steps[CHECKPOINT].blocks:
        block.forward = partial(torch_checkpoint, block.forward, **TORCH_OPTIONS)
    timing = compare(steps, rounds=rounds, title=f"compression, {dtype}")
    plain, case = steps.pop(NOTHING), f"{dtype}, dropout {dropout}"
    for name in steps:
        yield timing.row(f"time: {name}, {case}", name, NOTHING)
    peak, whole = plain.peak(), plain.kept()
    for name, step in steps.items():
        yield row(f"peak: {name}, {case}", NOTHING, "bytes", step.peak(), peak)
        kept = step.kept()
        yield row(f"kept: {name}, {case}", NOTHING, "bytes", kept, whole)
        if name in WAYS:
            predicted = compressed_activation_bytes(step.config, size.batch, size.sequence, WAYS[name]["method"],
                                                    dtype=DTYPES[dtype], device=device)
            yield row(f"predicted: {name}, {case}", "tracker", "bytes", predicted, kept)


def offload_rows(size, device, rounds):
    """Yield rows of our offload beside torch's and beside none: seconds, the device's peak, and the bytes kept on it.

    On a CPU neither offload moves anything.
    """
    pinned = torch.device(device).type == "cuda"
    ways = {"offload": offload_activations, SAVE_ON_CPU: lambda model: save_on_cpu(pin_memory=pinned),
            NOTHING: unchanged}
    steps = {name: CompressedStep(size, "fp32", 0.0, device, context) for name, context in ways.items()}
    timing = compare(steps, rounds=rounds, title="offload")
    gradients = [[p.grad for p in step.model.parameters()] for step in steps.values()]
    assert all(map(torch.equal, gradients[0], gradients[2])), "offload: the gradients differ"
    for peer in (SAVE_ON_CPU, NOTHING):
        yield timing.row("time: offload, fp32", "offload", peer)
    for what, reading in (("peak", CompressedStep.peak), ("kept on the device", CompressedStep.kept)):
        nbytes = {name: reading(step) for name, step in steps.items()}
        for peer in (SAVE_ON_CPU, NOTHING):
            yield row(f"{what}: offload, fp32", peer, "bytes", nbytes["offload"], nbytes[peer])


def gradient_rows(size, device):
    """Yield a row for each method: ‖Δ gradient‖ / ‖gradient‖ of one step, with fp32 as the reference, beside that of
    `torch.autocast` in bf16."""
    def gradient(context):
        step = CompressedStep(size, "fp32", 0.0, device, context)
        step()
        return torch.cat([p.grad.double().flatten() for p in step.model.parameters()])

    def error(context):
        return ((gradient(context) - exact).norm() / exact.norm()).item()

    exact = gradient(unchanged)
    autocast = error(lambda model: torch.autocast(torch.device(device).type, torch.bfloat16))
    for name, options in WAYS.items():
        yield row(f"gradient's error: {name}", "torch.autocast, bf16", "of its norm",
                  error(partial(compress_activations, **options)), autocast)


def training_rows(steps, device):
    """Yield a row for each method: the loss after `steps` steps on real text, beside that without compression.

    `curve`: means of ten losses each. The yardstick is a run without compression whose initial weights are changed by
    0.1 %. Its distance shows how far two equivalent runs drift apart.
    """
    plain = train(steps, device, unchanged)
    for name in tqdm([*WAYS, YARDSTICK], "training", delay=BAR_DELAY, leave=False):
        if name == YARDSTICK:
            losses = train(steps, device, unchanged, nudge=0.001)
        else:
            losses = train(steps, device, partial(compress_activations, smallest=0, **WAYS[name]))
        yield row(f"loss after {steps} steps: {name}", NOTHING, "nats", mean(losses[-LAST:]), mean(plain[-LAST:]),
                  curve=smooth(losses), peer_curve=smooth(plain))


def train(steps, device, context, nudge=0, rate=LEARNING_RATE):
    """Train a small GPT on real text and return its losses. The initial weights are multiplied by 1 + `nudge`.

    `context(model)` returns the context that forwards run in.
    """
    torch.manual_seed(0)
    model = GPT(SMALL.config(), device=device)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1 + nudge)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), []
    batches = TextData().batches(8, SMALL.sequence, device=device)
    for _ in range(steps):
        tokens, targets = next(batches)
        with context(model):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean(values):
    """Return the mean of `values`."""
    return sum(values) / len(values)


def smooth(values, width=10):
    """Return the means of `width` values each."""
    return [round(mean(values[i : i + width]), 4) for i in range(0, len(values), width)]
