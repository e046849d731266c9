"""Does each attention kernel run on this device, and is it right? The first thing to ask of a GPU: 20 seconds for all.

Each kernel computes two small calls in a process of its own, all at once, beside the definition in fp64. One that hangs
costs the others nothing. On a CPU Triton's interpreter runs the kernels that it can.
"""

import json
import math
import sys

import torch

from ..attention import flash_attention, reference_attention
from .attention_candidates import OURS, Shape, forward_candidates, reason
from .attention_trials import fault_of, in_order
from .record import row

SECONDS = 20
HEAD_DIMS = (128, 64)
LENGTH, HEADS, BATCH = 300, 2, 1  # 300 is no multiple of any tile
WITHIN = 0.02  # of the largest value, for a 16-bit dtype


def run(device="cpu", seconds=SECONDS, head_dims=HEAD_DIMS, names=OURS):
    """(settings, rows): one row a kernel and head_dim, as each is done."""
    kind = torch.device(device).type
    settings = {"shape": [BATCH, HEADS, LENGTH], "dtype": dtype_of(kind), "seconds for all": seconds,
                "calls": "full and causal", "kernels": "compiled" if kind == "cuda" else "interpreted"}
    return settings, all_rows(kind, seconds, head_dims, names)


def dtype_of(kind):
    """Triton's interpreter computes bfloat16 wrongly."""
    return "bfloat16" if kind == "cuda" else "float16"


def all_rows(kind, seconds, head_dims, names):
    """Yield the row of each kernel as its process ends; `verdict` is "right", or what is wrong."""
    python = [sys.executable] if kind == "cuda" else ["env", "TRITON_INTERPRET=1", sys.executable]
    commands = {(name, D): [*python, "-m", __name__, kind, name, str(D)] for D in head_dims for name in names}
    for (name, D), status, said, took in in_order(commands, seconds):
        errors = answer_of(said) if status == 0 else None
        if errors is None:
            value, verdict = None, fault_of(status, said)
        else:
            value = max(errors.values())
            verdict = "right" if all(error <= WITHIN for error in errors.values()) else "wrong"  # a NaN is not right
        yield row(f"largest error: {name}, d{D}", "allowed", "of the largest", value, WITHIN, name=name, head_dim=D,
                  errors=errors, verdict=verdict, seconds=round(took, 1), note=verdict)


def answer_of(said):
    """{tensor: error} from the last line, None if that says something else."""
    try:
        return json.loads(said[-1])
    except (IndexError, ValueError):
        return None


# --- in a process of its own -----------------------------------------------------------------------------------------


def errors_of(kind, name, D):
    """{"full output": largest error over the largest value, …} of one kernel, beside the definition in fp64."""
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
    """(which, ours, exact) of the output and the base-2 logsumexp."""
    call = forward_candidates(q, k, v, shape, anywhere=q.device.type == "cpu")[name]
    if isinstance(call, str):
        raise RuntimeError(call)
    out, lse2 = call()
    exact, lse = reference_attention(*(x.double() for x in (q, k, v)), causal=shape.causal, return_logsumexp=True)
    return [("output", out, exact), ("logsumexp", lse2, lse / math.log(2))]


def backward(name, shape, q, k, v, gradient):
    """(which, ours, exact) of the gradients, with the pointers' forward."""
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
