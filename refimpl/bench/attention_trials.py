"""Each of our kernels is tried in a process of its own before it is timed: one that hangs, or reads where it may not,
would take all other readings with it. What they compile there, at the same time, the bench finds in Triton's cache.
"""

import json
import subprocess
import sys
import time

import torch

from .attention_candidates import (
    OURS,
    Shape,
    agrees_with,
    backward_candidates,
    forward_candidates,
    ready,
    tensors,
)
from .record import CHECKOUT

SECONDS = 100  # for all of them at once
DONE = "done, nothing wrong"


def trials(device, chosen):
    """{(name, head_dim): reason} of ours that are not to be timed."""
    if torch.device(device).type != "cuda":
        return {}
    started = {(name, D): subprocess.Popen(command(name, [shape for shape in chosen if shape.head_dim == D]),
                                           cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for name in OURS for D in sorted({shape.head_dim for shape in chosen})}
    until, faults = time.monotonic() + SECONDS, {}
    for which, process in started.items():
        try:
            said = process.communicate(timeout=max(1, until - time.monotonic()))[0].strip().splitlines() or [""]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            faults[which] = f"hangs: its trial was not done after {SECONDS} seconds"
        else:
            if process.returncode or DONE not in said:
                faults[which] = said[-1][:200] or f"its trial ended with exit status {process.returncode}"
    return faults


def command(name, chosen):
    """The process for one of them: the shortest and the longest shapes."""
    lengths = [shape.length for shape in chosen]
    ends = [shape for shape in chosen if shape.length in (min(lengths), max(lengths))]
    return [sys.executable, "-m", __name__, name, json.dumps(ends)]


def trial(name, chosen, device="cuda", dtype=torch.bfloat16):
    """The first fault of one of ours, or DONE."""
    for shape in chosen:
        q, k, v, gradient = tensors(shape, device, dtype)
        if name == "triton_backward":
            given = backward_candidates(*(x.requires_grad_() for x in (q, k, v)), gradient, shape, backends=())
            _, reasons = ready(given)
        else:
            found = forward_candidates(q, k, v, shape)
            _, reasons = ready({name: found[name]}, agrees_with(found["triton_forward"]))
        if reasons:
            return reasons[name]
    return DONE


if __name__ == "__main__":
    print(trial(sys.argv[1], [Shape(*each) for each in json.loads(sys.argv[2])]))
