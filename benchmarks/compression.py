"""Compressed gradients: what each algorithm sends, what it learns of real text, and what a step costs over a slow link.

Two ranks train a small GPT for 250 steps, with and without error feedback, beside a run whose gradients are whole. Each
`ratio` is such that at most a tenth of the bytes is sent, but for int8, which sends a quarter. For time, compressed and
whole gradients, and torch's PowerSGD, take turns over a link of 10 MB/s. Last, all_reduce in a ring, along a tree and
on two levels, over links of two speeds.
"""

import functools
import math

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tqdm import tqdm

from refimpl.comm import Link, launch, tree_all_reduce, two_level_all_reduce
from refimpl.comm.tree import tree_seconds
from refimpl.comm.two_level import levels, ring_seconds, two_level_seconds
from refimpl.compression import GradientCompressor
from refimpl.compression.closed_forms import gradient_traffic
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel
from refimpl.zero.internals.hook import BucketLayout

from .ranks import seconds_of, slowest
from .record import row
from .runner import BAR_DELAY, Comparison

SIZES = {"vocab_size": 256, "context_length": 64, "layers": 2, "hidden": 64, "heads": 4}
STEPS, ROWS, LAST = 250, 8, 25  # steps, sequences of a rank, steps whose losses are averaged
SGD = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9)  # error feedback is proven for SGD, not for Adam
RATIOS = {"topk": 0.05, "threshold": 0.05, "random": 0.1, "int8": 1.0, "sign": 1.0, "powersgd": 0.09}
WITHIN = 1.01  # of the loss with whole gradients
LINK = Link(10e6, 1e-3)
INTRA, INTER = Link(200e6, 0.2e-3), Link(20e6, 40e-3)
REDUCED = {"1 kB": 1_000, "2 MB": 2_000_000}
WAYS = ("ring", "tree", "two levels")


def run(device="cpu", sizes=SIZES, steps=STEPS, rounds=7):
    """Return (settings, rows)."""
    torch.manual_seed(0)
    parameters = sum(p.numel() for p in GPT(GPTConfig(**sizes), device="meta").parameters())
    settings = {**sizes, "parameters": parameters, "ranks": 2, "steps": steps, "rows": ROWS, "ratios": str(RATIOS)}
    return settings, all_rows(device, sizes, steps, rounds)


def all_rows(device, sizes, steps, rounds):
    """Yield all rows: seconds of a reduction and of an all_reduce, then losses and bytes; on a GPU no losses, which are
    those of a CPU."""
    timing = Comparison(slowest(launch(times_of, 2, sizes, rounds, device=device, timeout=None)))
    pairs = {f"reduction over 10 MB/s, {name}": (name, "whole", "whole gradients") for name in RATIOS}
    pairs["reduction, powersgd"] = "ours", "theirs", "powerSGD_hook"
    for what, (name, other, peer) in pairs.items():
        yield row(what, peer, "s", timing.median(name), timing.median(other), paired=timing.paired(name, other))
    yield from by_levels(rounds)
    if device == "cpu":
        yield from by_losses(device, sizes, steps)


def by_losses(device, sizes, steps):
    """Yield the loss of each algorithm, with and without error feedback, and its bytes."""
    whole = launch(learned, 2, sizes, steps, None, True, device=device, timeout=None)[0]
    cases = [(name, feedback) for name in RATIOS for feedback in (True, False)]
    for name, feedback in tqdm(cases, desc="compression", delay=BAR_DELAY):
        ours = launch(learned, 2, sizes, steps, name, feedback, device=device, timeout=None)[0]
        what = f"{name}, {'error feedback' if feedback else 'no error feedback'}"
        held = {"held": WITHIN} if name in ("topk", "threshold", "powersgd") and feedback else {}
        loss = ours["loss"] if math.isfinite(ours["loss"]) else None
        if loss is None:
            held["diverged"] = True
        yield row(f"loss after {steps} steps, {what}", "whole gradients", "nats", loss, whole["loss"], **held)
        if feedback:
            yield row(f"bytes of gradients in a step, {name}", "whole gradients", "kB",
                      ours["bytes"] / 1e3, whole["bytes"] / 1e3, held=0.26 if name == "int8" else 0.1001)


def learned(comm, sizes, steps, algorithm, feedback, ratio=None):
    """Train on the text; return the mean loss of the last steps over all ranks, and bytes of gradients in a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hook = algorithm and GradientCompressor(algorithm, ratio or RATIOS[algorithm], feedback)
    engine = DataParallel(GPT(GPTConfig(**sizes), device=comm.device), comm, SGD, hook=hook)
    batches = TextData().batches(ROWS, sizes["context_length"], rank=comm.rank, world_size=comm.world_size,
                                 device=comm.device, epochs=None)
    losses = []
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = comm.all_reduce(torch.stack(losses), "avg")[-LAST:].mean().item()
    sent = (gradient_traffic(hook, hook.layouts, comm.world_size, comm.rank).total if hook else
            sum(bucket.nbytes for bucket in engine.buckets))
    return {"loss": mean, "bytes": sent, "curve": [x.item() for x in losses]}


class Bucket:
    """Stands for DDP's bucket, for torch's hook."""

    def __init__(self, flat, shapes):
        parts = flat.split([shape.numel() for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.buffer, self.gradients, self.index, self.is_last = lambda: flat, lambda: views, lambda: 0, lambda: True


def times_of(comm, sizes, rounds):
    """Return {who: seconds of each round}: a reduction of all gradients, over the link, and PowerSGD's without it."""
    torch.set_num_threads(1)
    shapes = [p.shape for p in GPT(GPTConfig(**sizes), device="meta").parameters()]
    firsts = torch.tensor([0, *(shape.numel() for shape in shapes)]).cumsum(0).tolist()
    layout = BucketLayout(firsts[-1], torch.float32, comm.device, list(zip(firsts, shapes, strict=False)))
    flat = torch.randn(firsts[-1], device=comm.device)
    hooks = {name: GradientCompressor(name, ratio) for name, ratio in RATIOS.items()}
    hooks["ours"] = GradientCompressor("powersgd", rank=4)
    for hook in hooks.values():
        hook.attach(comm, [layout])
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = 2

    def reduce(name):
        comm.link = None if name in ("ours", "theirs") else LINK
        if name == "whole":
            comm.all_reduce(flat, "avg")
        elif name == "theirs":
            powerSGD_hook(state, Bucket(flat.clone(), shapes)).wait()
        else:
            hooks[name].all_reduce(0, flat, flat.dtype, "").wait()
            hooks[name].step()

    times = seconds_of(comm, {name: functools.partial(reduce, name) for name in (*hooks, "whole", "theirs")}, rounds)
    comm.link = None
    return times


def by_levels(rounds):
    """Yield the seconds of each all_reduce beside its arithmetic. A link is a lower bound, to which a busy machine
    adds: the quickest round counts."""
    found = slowest(launch(all_reduces, 4, rounds, device="cpu", timeout=None))
    for name, nbytes in REDUCED.items():
        expected = {"ring": ring_seconds(nbytes, 4, INTER), "tree": tree_seconds(nbytes, 4, INTER),
                    "two levels": two_level_seconds(nbytes, 2, 2, INTRA, INTER)}
        for way, seconds in expected.items():
            yield row(f"all_reduce of {name}, {way}", "arithmetic", "s", min(found[f"{name} {way}"]), seconds,
                      held=1.1)


def all_reduces(comm, rounds):
    """Return {size and way: seconds of each round} on four ranks, two to a machine."""
    torch.set_num_threads(1)
    intra, inter = levels(comm, 2)
    comm.link, intra.link, inter.link = INTER, INTRA, INTER
    reductions = (comm.all_reduce, functools.partial(tree_all_reduce, comm),
                  functools.partial(two_level_all_reduce, intra, inter))
    calls = {f"{name} {way}": functools.partial(reduce, torch.ones(nbytes // 4))
             for name, nbytes in REDUCED.items() for way, reduce in zip(WAYS, reductions, strict=True)}
    return seconds_of(comm, calls, rounds, warmup=0)
