"""Each of our kernels is tried in a process of its own before it is timed: one that hangs, or reads where it may not,
would take all other readings with it. What they compile there the bench finds in Triton's cache.
"""

import json
import subprocess
import sys
import tempfile
import time

import torch

from .attention_candidates import OURS, Shape, agrees_with, backward_candidates, forward_candidates, ready, tensors
from .record import CHECKOUT
from .runner import cores

SECONDS = 60  # for all of them
GRACE = 5  # seconds that a process has to end in after it was killed: one that waits for a hung GPU may not
DONE = "done, nothing wrong"


def trials(device, chosen):
    """{(name, head_dim): reason} of ours that are not to be timed. Those that are expected to be the fastest are tried
    first, at the larger head_dim first."""
    if torch.device(device).type != "cuda":
        return {}
    commands = {(name, D): command(name, [shape for shape in chosen if shape.head_dim == D])
                for D in sorted({shape.head_dim for shape in chosen}, reverse=True) for name in OURS}
    outcomes = {which: fault_of(status, said) for which, status, said, _ in in_order(commands, SECONDS)}
    return {which: fault for which, fault in outcomes.items() if fault}


def command(name, chosen):
    """The process for one of them: the shortest and the longest shapes."""
    lengths = [shape.length for shape in chosen]
    ends = [shape for shape in chosen if shape.length in (min(lengths), max(lengths))]
    return [sys.executable, "-m", __name__, name, json.dumps(ends)]


def fault_of(status, said):
    """A trial's fault in a line, "" if there is none."""
    last = said[-1] if said else ""
    if isinstance(status, str):
        return status
    return "" if status == 0 and DONE in said else last[:200] or f"its trial ended with exit status {status}"


def in_order(commands, seconds, processes=None):
    """Run {which: command}, so many at once (default: one a core), in this order. Yields (which, exit status or what
    became of it instead, lines that it printed, seconds that it took) as each ends.

    After `seconds` for all, those that run are killed, and none is begun any more.
    """
    processes = processes or cores()
    waiting, running, start = list(commands), {}, time.monotonic()
    try:
        while waiting or running:
            late = time.monotonic() - start > seconds
            while waiting and len(running) < processes and not late:
                which = waiting.pop(0)
                running[which] = Trial(commands[which])
            for which, trial in list(running.items()):
                status = trial.process.poll()
                if status is None and late:
                    status = f"not done after {seconds} seconds for all{trial.kill()}"
                if status is not None:
                    del running[which]
                    yield which, status, trial.said(), time.monotonic() - trial.begun
            if late:
                for which in waiting:
                    yield which, f"not tried: the {seconds} seconds for all were used up", [], 0.0
                return
            time.sleep(0.02)
    finally:
        for trial in running.values():
            trial.kill()
            trial.output.close()


class Trial:
    """A process, and the file that it prints into: a pipe that nobody empties would stop it."""

    def __init__(self, command):
        self.begun, self.output = time.monotonic(), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, cwd=CHECKOUT, stdout=self.output, stderr=subprocess.STDOUT)

    def kill(self):
        """End it; returns "", or what to add if it would not end."""
        self.process.kill()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f", and {GRACE} seconds after it was killed it is still there"
        return ""

    def said(self):
        """The lines that it printed."""
        self.output.seek(0)
        lines = self.output.read().strip().splitlines()
        self.output.close()
        return lines


def trial(name, chosen, device="cuda", dtype=torch.bfloat16):
    """The first fault of one of ours, or DONE."""
    for shape in chosen:
        q, k, v, gradient = tensors(shape, device, dtype)
        if name == "triton_backward":
            given = backward_candidates(*(x.requires_grad_() for x in (q, k, v)), gradient, shape, peers=())
            _, reasons = ready(given)
        else:
            found = forward_candidates(q, k, v, shape)
            _, reasons = ready({name: found[name]}, agrees_with(found["triton_forward"]))
        if reasons:
            return reasons[name]
    return DONE


if __name__ == "__main__":
    print(trial(sys.argv[1], [Shape(*each) for each in json.loads(sys.argv[2])]))
