"""Timing of functions in alternation, so that other load on the machine affects all of them alike; the peak of one."""

import statistics
import time

import torch
from tqdm import tqdm

from refimpl import memory

from .record import row

BAR_DELAY = 2  # seconds until a progress bar is shown


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

    def paired(self, name, peer):
        """Return the median of the ratios round by round: two calls in succession see the same load of the machine."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[peer], strict=True))

    def row(self, what, name, peer, /, called=None, **more):
        """Make the row of the seconds of `name` beside those of `peer`, which the row calls `called`."""
        return row(what, called or peer, "s", self.median(name), self.median(peer), **more, spread=self.spread(name),
                   peer_spread=self.spread(peer))

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


def peak(function, device):
    """Return the peak of a call in bytes above its start, as requested from the allocator."""
    with memory.measure(device) as m:
        function()
    return m.peak


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
