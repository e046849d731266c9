"""What fits on one card beside a given host memory, what a step moves, and what the link makes of it: dry runs.

One rank trains a published model in bf16 on a sequence of 2,048 tokens, each block recomputed in backward. The code is
that of real ranks, on fake tensors; bytes are the largest of each memory in the second step. The link is the catalog's
rate of the card, in one direction; computation takes 8 FLOP a parameter and token (recomputation counts) at the card's
peak. So seconds are lower bounds, of which a real machine is some way off.
"""

import functools
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from refimpl import catalog, memory
from refimpl.checkpointing import checkpoint
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.offload import CPUAdam, HostStore
from refimpl.offload.copies import HOST_MEMORY
from refimpl.zero import Zero1, Zero2, Zero3

from ..record import row
from ..runner import BAR_DELAY

MODELS = ("llama2-7b", "llama2-70b")
CARDS = {"24 GB": "rtx-4090", "80 GB": "a100-80"}
HOSTS = (64 * 2**30, 512 * 2**30)
TOKENS = 2048
SUB_GROUP_SIZE = 2**25  # elements of a tile: fewer tiles, quicker dry runs; two tiles take 128 MB
UPDATE = functools.partial(CPUAdam, sub_group_size=SUB_GROUP_SIZE)
WAYS = {
    "no offload": (Zero1, {}),
    "HostStore, states": (Zero2, {"store": HostStore}),
    "CPUAdam": (Zero2, {"update": UPDATE}),
    "CPUAdam, ratio 0.7": (Zero2, {"update": functools.partial(UPDATE, ratio=0.7)}),
    "HostStore, all": (Zero3, {"store": HostStore}),
    "CPUAdam, parameters in HostStore": (Zero3, {"update": UPDATE, "store": HostStore}),
}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


class Taken(NamedTuple):
    """Bytes at the peak of a step in each memory, and bytes of a step on the link, in each direction."""

    device: int
    host: int
    to_host: int
    to_device: int


def in_a_step(name, stage, options, tokens=TOKENS):
    """Train a model for two steps; return what the second one took, as Taken."""
    config = GPTConfig.named(name)
    with torch.device("meta") if stage is Zero3 else torch.device("cpu"):
        model = GPT(config, dtype=torch.bfloat16, attention=attention)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward)
    made = {key: make() for key, make in options.items()}
    engine = stage(model, FakeCommunicator(0, 1), ADAMW, **made)
    x = torch.zeros(1, tokens, dtype=torch.int64)
    for _ in range(2):
        before = moved(engine)
        with memory.track(model, engine.optimizer, *engine.parameters.shards.values()) as t:
            engine.backward(engine.forward(x, x))
            engine.step()
    nbytes, categories = t.timeline.nbytes, t.timeline.categories
    host = nbytes[:, categories.index(HOST_MEMORY)] if HOST_MEMORY in categories else 0 * nbytes[:, 0]
    out, back = (after - count for after, count in zip(moved(engine), before, strict=True))
    return Taken(int((nbytes.sum(1) - host).max()), int(host.max()), out, back)


def attention(q, k, v):
    """Attend without a matrix of scores."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def moved(engine):
    """Return bytes copied so far (to host, to device), by store and update."""
    counts = [getattr(each, "moved", None) for each in (engine._stored.store, getattr(engine.update, "link", None))]
    return [sum(count[direction] for count in counts if count) for direction in ("to host", "to device")]


@functools.cache
def taken(name, way, tokens=TOKENS):
    """Return Taken of a dry run."""
    stage, options = WAYS[way]
    return memory.dry_run(in_a_step, name, stage, options, tokens).result


def too_large(found, card, host):
    """Tell what does not fit: "", "device", "host" or "device, host"."""
    room = {"device": catalog.hardware(card).memory_bytes, "host": host}
    return ", ".join(name for name, size in room.items() if getattr(found, name) > size)


def seconds(found, card, parameters, tokens=TOKENS):
    """Return the least seconds of a step on the link, the longer direction, and of its computation."""
    hardware = catalog.hardware(card)
    link = max(found.to_host, found.to_device) / hardware.pcie_bandwidth
    return {"link": link, "computation": 8 * parameters * tokens / hardware.bf16_flops}


def fit_rows(models):
    """Yield, for each model and way, the bytes of a step in each memory beside what a card and a host have."""
    for name, way in tqdm([(name, way) for name in models for way in WAYS], "dry runs", delay=BAR_DELAY):
        found = taken(name, way)
        parameters = GPTConfig.named(name).parameter_count()
        for room, card in CARDS.items():
            for host in HOSTS:
                times = seconds(found, card, parameters)
                yield row(f"{name}, {way}", f"{room} and {host / 2**30:.0f} GB of host memory", "GB",
                          (found.device + found.host) / 1e9, (catalog.hardware(card).memory_bytes + host) / 1e9,
                          device=found.device / 1e9, host=found.host / 1e9, to_host=found.to_host / 1e9,
                          to_device=found.to_device / 1e9, too_large=too_large(found, card, host),
                          link_seconds=times["link"], computation_seconds=times["computation"])
