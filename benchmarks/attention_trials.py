"""Trials of our kernels before they are timed, each in its own process.

A kernel that hangs or reads out of bounds would end all other measurements. What a trial compiles is in Triton's cache
when the bench needs it.
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
GRACE = 5  # seconds for a killed process to end: one that waits for a hung GPU may never end
DONE = "done, nothing wrong"


def trials(device, chosen):
    """Try our kernels and return {(name, head_dim): reason} of those that must not be timed.

    The kernels are tried in the order of OURS, at the largest head_dim first.
    """
    if torch.device(device).type != "cuda":
        return {}
    commands = {(name, D): command(name, [shape for shape in chosen if shape.head_dim == D])
                for D in sorted({shape.head_dim for shape in chosen}, reverse=True) for name in OURS}
    outcomes = {which: fault_of(status, said) for which, status, said, _ in in_order(commands, SECONDS)}
    return {which: fault for which, fault in outcomes.items() if fault}


def command(name, chosen):
    """Return the command line that tries one kernel at the shortest and the longest shapes."""
    lengths = [shape.length for shape in chosen]
    ends = [shape for shape in chosen if shape.length in (min(lengths), max(lengths))]
    return [sys.executable, "-m", __name__, name, json.dumps(ends)]


def fault_of(status, said):
    """Return a trial's fault in one line, "" if there is none."""
    last = said[-1] if said else ""
    if isinstance(status, str):
        return status
    return "" if status == 0 and DONE in said else last[:200] or f"its trial ended with exit status {status}"


def in_order(commands, seconds, processes=None):
    """Run the processes {which: command} in this order, `processes` at a time (default: one per core).

    Yields (which, exit status, printed lines, seconds) as each ends. After `seconds` in all, running processes are
    killed and no other is started; a string that says so takes the place of their exit status.
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
    """A process and the file that it prints into. (A pipe that nobody reads would block the process when full.)"""

    def __init__(self, command):
        self.begun, self.output = time.monotonic(), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, cwd=CHECKOUT, stdout=self.output, stderr=subprocess.STDOUT)

    def kill(self):
        """Kill the process. Returns "", or an addition to the message if it does not end."""
        self.process.kill()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f", and {GRACE} seconds after it was killed it is still there"
        return ""

    def said(self):
        """Return the lines that it printed, and close the file."""
        self.output.seek(0)
        lines = self.output.read().strip().splitlines()
        self.output.close()
        return lines


def trial(name, chosen, device="cuda", dtype=torch.bfloat16):
    """Return the first fault of one of our kernels, or DONE."""
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
