"""What five kinds of program ask an allocator for, read by dry runs: `TRACES` has a function for each.

Each returns an AllocationTrace. Sizes are those of a model of 0.1 billion parameters in bf16; nothing is allocated.
"""

import random

import torch

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.comm import FakeCommunicator
from refimpl.common.allocations import AllocationTrace
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero3

SHAPE = {"vocab_size": 8192, "context_length": 4096, "layers": 8, "hidden": 1024, "heads": 16}
DTYPE = torch.bfloat16


def _attention(q, k, v, *, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def train(shapes, *, recomputed=False, ranks=None):
    """Train a GPT on batches of these shapes (B, T), with AdamW; on one of `ranks` by ZeRO-3 if they are given."""
    model = GPT(GPTConfig(**SHAPE), _attention, dtype=DTYPE)
    engine = Zero3(model, FakeCommunicator(0, ranks), look_ahead=2) if ranks else None
    optimizer = None if engine else torch.optim.AdamW(model.parameters())
    if recomputed:
        recompute(model.blocks)
    for shape in shapes:
        tokens = torch.zeros(shape, dtype=torch.int64)
        if engine:
            engine.backward(engine.forward(tokens, tokens))
            engine.step()
        else:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


def generate(tokens=96, requests=12, layers=8, hidden=1024, at_once=6, seed=0):
    """Decode: each request has keys and values of its own, which a new token makes one longer (torch.cat). When a
    request ends, the next begins, with a prompt of another length."""
    dice = random.Random(seed)
    waiting = [(dice.randrange(64, 1024), dice.randrange(tokens // 2, tokens)) for _ in range(requests)]
    running = []
    while waiting or running:
        while waiting and len(running) < at_once:
            prompt, left = waiting.pop()
            running.append([left, [torch.empty(2, prompt, hidden, dtype=DTYPE) for _ in range(layers)]])
        for request in running:
            request[0] -= 1
            x = torch.empty(1, hidden, dtype=DTYPE)
            for i, cache in enumerate(request[1]):
                request[1][i] = torch.cat((cache, x.expand(2, 1, hidden)), 1)
                x = x + torch.softmax(x @ request[1][i][0].T, -1) @ request[1][i][1]
        running = [request for request in running if request[0]]


def mixture(steps=6, tokens=8192, hidden=1024, experts=16, layers=4, seed=0):
    """Train a mixture of experts: how many tokens each expert gets differs from layer to layer and step to step."""
    dice = random.Random(seed)
    up = [torch.nn.Parameter(torch.empty(experts, hidden, 4 * hidden, dtype=DTYPE)) for _ in range(layers)]
    down = [torch.nn.Parameter(torch.empty(experts, 4 * hidden, hidden, dtype=DTYPE)) for _ in range(layers)]
    for _ in range(steps):
        x = torch.empty(tokens, hidden, dtype=DTYPE)
        for w_up, w_down in zip(up, down, strict=True):
            cuts = sorted(dice.randrange(tokens + 1) for _ in range(experts - 1))
            parts = x.split([b - a for a, b in zip((0, *cuts), (*cuts, tokens), strict=True)])
            x = x + torch.cat([torch.nn.functional.gelu(part @ w_up[i]) @ w_down[i] for i, part in enumerate(parts)])
        x.sum().backward()
        for parameter in (*up, *down):
            parameter.grad = None


def _lengths(steps=8, seed=0):
    dice = random.Random(seed)
    return [(4, 64 * dice.randrange(4, 65)) for _ in range(steps)]


PROGRAMS = {
    "sequences of varying length": lambda: train(_lengths()),
    "ZeRO-3, gathers and releases": lambda: train([(4, 2048)] * 3, ranks=8),
    "recomputation, varying length": lambda: train(_lengths(), recomputed=True),
    "generation, caches that grow": generate,
    "mixture of experts": mixture,
}


def trace_of(name):
    """Return the AllocationTrace of a program by its name in PROGRAMS."""
    return AllocationTrace.of(memory.dry_run(PROGRAMS[name]))
