"""A smoke test of each attention kernel: does it run on this device, and is it right? It takes 20 seconds for all.

Each kernel computes two small calls in its own process, and the results are compared with the definition in fp64. The
processes run at the same time, so one that hangs does not delay the others. On a CPU, Triton's interpreter runs the
kernels that it supports.
"""

import json
import math
import sys

import torch

from refimpl.attention import flash_attention, reference_attention

from .attention.kernels import OURS, Shape, forward_candidates, reason
from .record import row
from .trials import fault_of, in_order

SECONDS = 20
HEAD_DIMS = (128, 64)
LENGTH, HEADS, BATCH = 300, 2, 1  # 300 is no multiple of any tile
WITHIN = 0.02  # the error allowed, as a share of the largest value, for a 16-bit dtype


def run(device="cpu", seconds=SECONDS, head_dims=HEAD_DIMS, names=OURS):
    """Test the kernels: (settings, rows), one row for each kernel and head_dim as soon as it is done."""
    kind = torch.device(device).type
    settings = {"shape": [BATCH, HEADS, LENGTH], "dtype": dtype_of(kind), "seconds for all": seconds,
                "calls": "full and causal", "kernels": "compiled" if kind == "cuda" else "interpreted"}
    return settings, all_rows(kind, seconds, head_dims, names)


def dtype_of(kind):
    """Return the dtype to test. On a CPU it is fp16, since Triton's interpreter computes bf16 wrongly."""
    return "bfloat16" if kind == "cuda" else "float16"


def all_rows(kind, seconds, head_dims, names):
    """Yield the row of each kernel as its process ends. `verdict` is "right", "wrong" or the fault."""
    python = [sys.executable] if kind == "cuda" else ["env", "TRITON_INTERPRET=1", sys.executable]
    commands = {(name, D): [*python, "-m", __name__, kind, name, str(D)] for D in head_dims for name in names}
    for (name, D), status, said, took in in_order(commands, seconds):
        errors = answer_of(said) if status == 0 else None
        if errors is None:
            value, verdict = None, fault_of(status, said)
        else:
            value = max(errors.values())
            verdict = "right" if all(error <= WITHIN for error in errors.values()) else "wrong"  # a NaN is wrong
        yield row(f"largest error: {name}, d{D}", "allowed", "of the largest", value, WITHIN, name=name, head_dim=D,
                  errors=errors, verdict=verdict, seconds=round(took, 1), note=verdict)


def answer_of(said):
    """Parse {tensor: error} from the last printed line; None if it is something else."""
    try:
        return json.loads(said[-1])
    except (IndexError, ValueError):
        return None


# --- in a process of its own -----------------------------------------------------------------------------------------


def errors_of(kind, name, D):
    """Return {"full output": largest error over largest value, …} of one kernel, against the definition in fp64."""
    found = {}
    for causal in (False, True):
        torch.manual_seed(0)
        shape = Shape(BATCH * LENGTH, HEADS * D, D, LENGTH, causal)
        q, k, v, gradient = (torch.randn(shape.dims).to(kind, getattr(torch, dtype_of(kind))) for _ in range(4))
        pairs = backward if name == "triton_backward" else forward
        for which, ours, exact in pairs(name, shape, q, k, v, gradient):
            error = ((ours.double() - exact).abs().max() / exact.abs().max()).item()
            found[f"{'causal' if causal else 'full'} {which}"] = error
    return found


def forward(name, shape, q, k, v, gradient):
    """Return [(name, ours, exact)] of the output and the base-2 logsumexp."""
    call = forward_candidates(q, k, v, shape, anywhere=q.device.type == "cpu")[name]
    if isinstance(call, str):
        raise RuntimeError(call)
    out, lse2 = call()
    exact, lse = reference_attention(*(x.double() for x in (q, k, v)), causal=shape.causal, return_logsumexp=True)
    return [("output", out, exact), ("logsumexp", lse2, lse / math.log(2))]


def backward(name, shape, q, k, v, gradient):
    """Return [(name, ours, exact)] of the gradients. The forward is `triton_forward`."""
    given = [x.requires_grad_() for x in (q, k, v)]
    ours = torch.autograd.grad(flash_attention(*given, causal=shape.causal, kernel="triton"), given, gradient)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = torch.autograd.grad(reference_attention(*wide, causal=shape.causal), wide, gradient.double())
    return list(zip(("dq", "dk", "dv"), ours, exact, strict=True))


if __name__ == "__main__":
    try:
        print(json.dumps(errors_of(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
    except Exception as error:
        sys.exit(reason(error))
