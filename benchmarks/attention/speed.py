"""TFLOP/s of our attention kernels beside each of PyTorch's backends and the chip's own rates, in one run.

The FLOPs are those of the matrix products that no method can omit (`attention_flops`): 2 in a forward, and 5 in a
backward that recomputes the weights, which is 2.5 times the forward. This is the usual count. A kernel that computes 7
products in its backward gets no credit for the other two. Each row gives the ratio to a peer, and whether it reached
the target: "met" or "short".
"""

import torch
from tqdm import tqdm

from refimpl import catalog

from ..record import row
from ..runner import BAR_DELAY, compare
from .kernels import (
    DETERMINISTIC,
    OURS,
    PEERS,
    Shape,
    agrees_with,
    backward_candidates,
    forward_candidates,
    ready,
    tensors,
)

# Part of the driver's name → name in the catalog.
PUBLISHED = {"H100 80GB HBM3": "h100-sxm", "H100 PCIe": "h100-pcie", "H200": "h200"}

# The speed relative to a peer: (pass, peer) → (head_dim, causal) → factor. TARGETS are binding, AIMS are not.
TARGETS = {
    ("forward", "FLASH_ATTENTION"): {(128, False): 1.25, (128, True): 1.25, (64, False): 1.1, (64, True): 1.1},
    ("forward", "CUDNN_ATTENTION"): {(128, False): 0.85, (128, True): 0.85},
    ("backward", DETERMINISTIC): {(128, False): 1.1, (128, True): 1.1, (64, False): 1.1, (64, True): 1.1},
}
AIMS = {
    ("forward", "CUDNN_ATTENTION"): {(64, False): 1.0, (64, True): 1.0},
    ("backward", "CUDNN_ATTENTION"): {(128, False): 0.8, (128, True): 0.8, (64, False): 0.8, (64, True): 0.8},
}


def shapes(tokens=16384, width=2048, head_dims=(128, 64), lengths=(16384, 8192, 4096, 2048)):
    """Return all shapes to compare, the most important first, in case the run is interrupted."""
    return [Shape(tokens, width, D, N, causal) for D in head_dims for causal in (False, True) for N in lengths]


def speed_rows(device, chosen, rounds, timer=None, dtype=torch.bfloat16, faults=None):
    """Yield rows of each Shape, forward and backward: each of our kernels beside each peer.

    `faults`: {(name, head_dim): reason} of the kernels that must not be called.
    """
    for shape in tqdm(chosen, "shapes", delay=BAR_DELAY, leave=False):
        q, k, v, gradient = tensors(shape, device, dtype)
        own = {name: words for (name, D), words in (faults or {}).items() if D == shape.head_dim}
        found = forward_candidates(q, k, v, shape)
        found |= {name: own[name] for name in found if name in own}
        yield from rows_beside("forward", shape, *ready(found, agrees_with(found["triton_forward"])), rounds, timer)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        found = backward_candidates(q, k, v, gradient, shape, faults=own)
        yield from rows_beside("backward", shape, *ready(found), rounds, timer)


# --- rows ------------------------------------------------------------------------------------------------------------


def rows_beside(direction, shape, calls, reasons, rounds, timer):
    """Return a row for each of our kernels beside each peer. One that does not run has the value None and a reason."""
    timing = compare(calls, rounds=rounds, title=f"{direction}, {shape}", timer=timer) if calls else None
    flops, nbytes = shape.work(direction)
    rows = []
    for name in [name for name in (*calls, *reasons) if name in OURS]:
        for peer in PEERS[direction]:
            values = [flops / timing.median(who) / 1e12 if who in calls else None for who in (name, peer)]
            aim = verdict(direction, peer, shape, values[0] / values[1] if None not in values else None)
            seconds, spread = ([getattr(timing, what)(who) if who in calls else None for who in (name, peer)]
                               for what in ("median", "spread"))
            note = [f"{who}: {reasons[who]}" for who in (name, peer) if who in reasons]
            rows.append(row(f"{direction}, {shape}: {name}", peer, "TFLOP/s", *values, **shape._asdict(),
                            direction=direction, name=name, seconds=seconds[0], peer_seconds=seconds[1],
                            spread=spread[0], peer_spread=spread[1], flops=flops, floor_bytes=nbytes,
                            intensity=flops / nbytes, **aim, note="; ".join([*note, *_aim_words(aim)])))
    return rows


def verdict(direction, peer, shape, ratio):
    """Return {kind: "target" or "aim", factor, verdict} of a comparison; {} if it has none."""
    for kind, table in (("target", TARGETS), ("aim", AIMS)):
        factor = table.get((direction, peer), {}).get((shape.head_dim, shape.causal))
        if factor:
            reached = "not measured" if ratio is None else "met" if ratio >= factor else "short"
            return {"kind": kind, "factor": factor, "verdict": reached}
    return {}


def _aim_words(aim):
    return [f"{aim['kind']} {aim['factor']}: {aim['verdict']}"] if aim else []


def rate_rows(device, rounds=15, timer=None, dtype=torch.bfloat16, size=8192, buffer_bytes=2**30):
    """Return the rows of the chip's own rates in this run: a large matrix product in TFLOP/s and a large copy in TB/s,
    beside the published figures where the catalog has them."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(buffer_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = compare({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=rounds, title="rates",
                     timer=timer)
    peer, published = published_rates(device)
    return [row(f"matrix rate: a product of {size:,} × {size:,} matrices", peer, "TFLOP/s",
                2 * size**3 / timing.median("product") / 1e12, published[0], name="matrix rate",
                seconds=timing.median("product"), spread=timing.spread("product")),
            row(f"memory rate: a copy of {buffer_bytes:,} bytes, read and written", peer, "TB/s",
                2 * buffer_bytes / timing.median("copy") / 1e12, published[1], name="memory rate",
                seconds=timing.median("copy"), spread=timing.spread("copy"))]


def published_rates(device):
    """Return (source, (TFLOP/s, TB/s)) as the maker publishes them; None for both if they are not in the catalog."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    entry = next((entry for words, entry in PUBLISHED.items() if words in name), None)
    if entry is None:
        return "published", (None, None)
    hardware = catalog.hardware(entry)
    return f"published, {entry}", (hardware.bf16_flops / 1e12, hardware.memory_bandwidth / 1e12)
