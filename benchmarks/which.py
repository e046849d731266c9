"""Seven ways to attend, at four lengths: bytes of a forward and backward, FLOPs of a forward, and the closed forms.

The forms are those in PyTorch, on a CPU, so that every product is counted and every tensor seen; kernels take what the
closed forms of `refimpl.attention.which` say for them.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from refimpl import memory
from refimpl.attention.which import METHODS

from .record import row
from .runner import BAR_DELAY

HEADS, HEAD_DIM, LENGTHS = 2, 64, (512, 1024, 2048, 4096)


def run(device="cpu", lengths=LENGTHS):
    """Read all methods, on a CPU whatever `device` says: (settings, rows), two rows for each method and length."""
    return {"shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM}, "dtype": "float32",
            "tensors on": "cpu"}, rows(lengths)


def rows(lengths):
    """Yield the rows."""
    for T in lengths:
        shape = (1, HEADS, T, HEAD_DIM)
        q, k, v, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(4))
        for name, method in tqdm(METHODS.items(), f"{T} tokens", delay=BAR_DELAY, leave=False):
            call, where = method.call(shape), {"method": name, "tokens": T}
            call(q, k, v)  # what is made once, such as a mask's lists
            with memory.track(q, k, v, gradient) as tracked:
                call(*(x.requires_grad_() for x in (q, k, v))).backward(gradient)
                q.grad = k.grad = v.grad = None
            read = tracked.peak.total - tracked.start.total
            yield row(f"peak, {name}, {T:,} tokens", "closed form", "bytes", read, method.peak(
                shape, torch.float32, False), **where)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                call(q, k, v)
            yield row(f"forward, {name}, {T:,} tokens", "closed form", "FLOPs", counter.get_total_flops(),
                      method.flops(shape), **where, note="triangular systems are not counted" * (name == "linear"))


def readings(rows):
    """Return {method: {tokens: (bytes, FLOPs)}} of the rows."""
    found = {}
    for each in rows:
        found.setdefault(each["method"], {}).setdefault(each["tokens"], {})[each["unit"]] = each["value"]
    return {name: {T: (read["bytes"], read["FLOPs"]) for T, read in by.items()} for name, by in found.items()}
