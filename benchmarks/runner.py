"""Timing of functions in alternation, so that other load on the machine affects all of them alike."""

import os
import statistics
import time

import torch
from tqdm import tqdm

BAR_DELAY = 2  # seconds until a progress bar is shown


def cores():
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Comparison:
    """Holds what `compare` measured. `seconds`: name → the seconds of each round, in order."""

    def __init__(self, seconds):
        self.seconds = seconds

    def median(self, name):
        """Return the median seconds of one call."""
        return statistics.median(self.seconds[name])

    def spread(self, name):
        """Return the interquartile range in seconds: half of the rounds are within it."""
        low, _, high = statistics.quantiles(self.seconds[name], n=4, method="inclusive")
        return high - low

    def ratio(self, name, peer):
        """Return the median of `name` over that of `peer`: 2.0 means twice as slow."""
        return self.median(name) / self.median(peer)

    def __repr__(self):
        width = max(map(len, self.seconds))
        return "\n".join(f"{name:<{width}}  {self.median(name):.4g} s, interquartile range {self.spread(name):.2g} s"
                         for name in self.seconds)


def compare(candidates, *, rounds=11, warmup=2, title="comparing", timer=None):
    """Time each of `candidates` (name → function without arguments) in alternation: A B A B …; returns a Comparison.

    The first `warmup` rounds are not counted. The default timer waits for the CUDA device before and after each call.
    `timer` (function → seconds) replaces it, for example by a `KernelTimer`.

    Raises ValueError for no candidates, fewer than 2 rounds (which have no spread) or a negative `warmup`.
    """
    timer = timer or _time
    if not candidates:
        raise ValueError(f"candidates={candidates!r}: expected at least one, compare({{'ours': f, 'peer': g}})")
    if rounds < 2 or warmup < 0:
        raise ValueError(f"rounds={rounds}, warmup={warmup}: expected at least 2 rounds and 0 or more of warm-up")
    seconds = {name: [] for name in candidates}
    with tqdm(total=(warmup + rounds) * len(candidates), desc=title, delay=BAR_DELAY, leave=False) as progress:
        for turn in range(warmup + rounds):
            for name, function in candidates.items():
                elapsed = timer(function)
                if turn >= warmup:
                    seconds[name].append(elapsed)
                progress.update()
    return Comparison(seconds)


def seconds_in_turns(comm, trainers, rounds, warmup):
    """Return {name: seconds of each round} of `trainers`, {name: (trainer, tokens)}: `trainer.step(tokens)` of each in
    turns, with every rank of `comm` at the same step. The first `warmup` rounds are not counted."""
    seconds = {name: [] for name in trainers}
    for turn in range(warmup + rounds):
        for name, (trainer, tokens) in trainers.items():
            comm.barrier()
            start = time.perf_counter()
            trainer.step(tokens)
            synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _time(function):
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def synchronize():
    """Wait for the work queued on the CUDA device, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class KernelTimer:
    """Measures the seconds that a CUDA device works on a function, without the host's time to launch it.

    It is a timer for `compare`. Before each call it writes a buffer larger than any cache, so that no data of the last
    call is cached. The device takes about a millisecond for that, during which the host launches the call.
    """

    def __init__(self, device, buffer_bytes=2 * 2**30):
        free, _ = torch.cuda.mem_get_info(device)
        self.buffer = torch.empty(min(buffer_bytes, free // 4), dtype=torch.uint8, device=device)

    def __call__(self, function):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.buffer.zero_()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000
