"""Trainers on several ranks: bytes of a step, of each alone in its own ranks; seconds of a step, of all in turns.

A trainer has `step(tokens)`, which makes one training step and returns its loss.
"""

import time

import torch

from refimpl import memory

from .runner import synchronize


def place_of(world, device):
    """Return "cuda" if each rank has a GPU of its own, as NCCL needs, through which torch moves CUDA tensors."""
    return "cuda" if torch.device(device).type == "cuda" and torch.cuda.device_count() >= world else "cpu"


def slowest(ranks):
    """Merge the ranks' seconds to {name: seconds of each round}: a step lasts until the last rank is done."""
    return {name: list(map(max, *(rank[name] for rank in ranks))) for name in ranks[0]}


def check_losses(name, losses, peer, expected):
    """Raise RuntimeError if the losses of two trainers differ."""
    if max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)) > 1e-4:
        raise RuntimeError(f"{name} has losses {losses}, {peer} {expected}: expected the same to 1e-4")


# --- in a rank -------------------------------------------------------------------------------------------------------


def bytes_alone(comm, make, steps, *args):
    """Return {"held": bytes of a trainer between two steps, without its tokens; "taken": what a step takes on top;
    "losses": of the `steps` before}, as the allocator alone reads it. `make(*args)`: (trainer, tokens)."""
    with memory.measure(comm.device) as before:
        trainer, tokens = make(*args)
        losses = [trainer.step(tokens) for _ in range(steps)]
        comm.barrier()  # until gloo's threads are idle: PyTorch's profiler may crash if it ends while one frees
    with memory.measure(comm.device) as step:
        trainer.step(tokens)
        comm.barrier()
    return {"held": before.net - tokens.nbytes, "taken": step.peak, "losses": losses}


def seconds_of(comm, calls, rounds, warmup=1):
    """Return {name: seconds of each round} of `calls`, {name: function}: each in turns, with every rank of `comm` at
    the same one. The first `warmup` rounds are not counted."""
    seconds = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, call in calls.items():
            comm.barrier()
            start = time.perf_counter()
            call()
            synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds
