"""Tensor and sequence parallelism beside torch's (DTensor), on one plain model that both split from outside.

Four ranks train a decoder of 7 million parameters, its vocabulary and loss split, too. For bytes, each runs alone in
its own ranks: what is held before a step and what the step takes on top, on the rank that takes most, as the allocator
alone reads it. For time, all take turns in the same ranks. Their losses agree, or the reading ends with an error.
"""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from tqdm import tqdm

from refimpl.comm import launch
from refimpl.tensor import sequence_parallel, tensor_parallel, vocabulary_parallel_cross_entropy

from .ranks import bytes_alone, check_losses, place_of, seconds_of, slowest
from .record import row
from .runner import BAR_DELAY, Comparison

SIZES = {"vocabulary": 8192, "context": 128, "layers": 4, "hidden": 256, "heads": 8}
WORLD, ROWS, STEPS = 4, 8, 3  # ranks, sequences in a step, steps whose losses are compared
TORCH, TORCH_SEQUENCE = "torch.distributed.tensor.parallel", "torch.distributed.tensor.parallel, SequenceParallel"
PAIRS = [("tensor_parallel", TORCH), ("sequence_parallel", TORCH_SEQUENCE)]
TIME_HELD, BYTES_HELD = {"tensor_parallel": 0.75, "sequence_parallel": 0.7}, 0.85  # multiples of the peer's


class Attention(nn.Module):
    """Causal attention with q, k and v apart, as the peer splits them: x (B, T, C) to (B, T, C)."""

    def __init__(self, C, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))
        self.head_dim = C // heads

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers with a GELU between them: x (B, T, C) to (B, T, C), 4 C hidden features."""

    def __init__(self, C):
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer of the decoder, with norms before attention and MLP: x (B, T, C) to (B, T, C)."""

    def __init__(self, C, heads):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(C), Attention(C, heads), nn.LayerNorm(C), MLP(C)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A plain decoder, tokens (B, T) to x (B, T, C); `head` gives logits."""

    def __init__(self, vocabulary, context, layers, hidden, heads):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Ours:
    """Trains a decoder split by `refimpl.parallel`. `step(tokens)` returns the loss."""

    plan = {"embedding": "vocabulary", **dict.fromkeys((f"blocks.*.attention.{part}" for part in "qkv"), "column"),
            "blocks.*.attention.out": "row", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row", "head": "head"}

    def __init__(self, split, model, comm):
        options = {"region": ("blocks", "norm")} if split is sequence_parallel else {}
        self.model, self.comm = split(model, comm, self.plan, **options), comm
        self.optimizers = [torch.optim.AdamW(model.parameters())]

    def step(self, tokens):
        logits = self.model.head(self.model(tokens), gather=False).flatten(0, 1)
        loss = vocabulary_parallel_cross_entropy(logits, tokens.flatten(), self.comm, self.model.head.features,
                                                 overwrite=True)
        return stepped(loss, self.optimizers)


class Theirs:
    """Trains a decoder split by torch, as its tutorial of tensor parallelism shows. A DTensor and a tensor cannot be
    in one optimizer."""

    def __init__(self, sequence, model, comm):
        rows = {"output_layouts": Shard(1)} if sequence else {}
        block = {**{f"attention.{part}": ColwiseParallel() for part in "qkv"}, "mlp.up": ColwiseParallel(),
                 "attention.out": RowwiseParallel(**rows), "mlp.down": RowwiseParallel(**rows)}
        ends = {"embedding": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(use_local_output=False)}
        if sequence:
            gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(),
                      "attention": PrepareModuleInput(**gathered), "mlp": PrepareModuleInput(**gathered)}
            ends |= {"norm": SequenceParallel(),
                     "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                     "blocks.0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),),
                                                    use_local_output=True)}
        plan = {f"blocks.{i}.{key}": style for i in range(len(model.blocks)) for key, style in block.items()} | ends
        self.model = parallelize_module(model, init_device_mesh(comm.device.type, (comm.world_size,)), plan)
        split = [isinstance(p, DTensor) for p in model.parameters()]
        self.optimizers = [torch.optim.AdamW([p for p, is_split in zip(model.parameters(), split, strict=True)
                                              if is_split == each]) for each in {*split}]

    def step(self, tokens):
        with loss_parallel():
            loss = F.cross_entropy(self.model.head(self.model(tokens)).flatten(0, 1), tokens.flatten())
            return stepped(loss, self.optimizers)


def stepped(loss, optimizers):
    """Run the backward of a loss and the optimizers; return the loss as a number."""
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


TRAINERS = {"tensor_parallel": functools.partial(Ours, tensor_parallel), TORCH: functools.partial(Theirs, False),
            "sequence_parallel": functools.partial(Ours, sequence_parallel),
            TORCH_SEQUENCE: functools.partial(Theirs, True)}


def run(device="cpu", sizes=SIZES, world=WORLD, rounds=15):
    """Measure the peak and the seconds of a step of each: (settings, rows)."""
    device = place_of(world, device)
    settings = {"model": sizes, "parameters": sum(p.numel() for p in Decoder(**sizes).parameters()), "dtype": "fp32",
                "ranks": world, "sequences": ROWS, "tokens on": device, "rounds": rounds, "optimizer": "AdamW"}
    return settings, all_rows(device, sizes, world, rounds)


def all_rows(device, sizes, world, rounds):
    """Yield the rows of bytes pair by pair, then those of time. RuntimeError if losses differ."""
    losses = {}
    for pair in tqdm(PAIRS, "bytes", delay=BAR_DELAY, leave=False):
        ranks = [launch(bytes_of, world, name, sizes, device=device, timeout=300) for name in pair]
        ours, theirs = (max(rank["peak"] for rank in each) / 1e6 for each in ranks)
        losses |= {name: each[0]["losses"] for name, each in zip(pair, ranks, strict=True)}
        yield row(f"peak of a step, {pair[0]}", pair[1], "MB", ours, theirs, bound=BYTES_HELD)
    first = losses[PAIRS[0][0]]
    for name, each in losses.items():
        check_losses(name, each, PAIRS[0][0], first)
    timing = Comparison(slowest(launch(times_of, world, sizes, rounds, device=device, timeout=900)))
    for name, peer in PAIRS:
        yield timing.row(f"step, {name}", name, peer, paired=timing.paired(name, peer), bound=TIME_HELD[name])


# --- in a rank -------------------------------------------------------------------------------------------------------


def made(name, comm, sizes):
    """Make (trainer, tokens), the same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = TRAINERS[name](Decoder(**sizes).to(comm.device), comm)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(sizes["vocabulary"], (ROWS, sizes["context"]), generator=generator)
    return trainer, tokens.to(comm.device)


def bytes_of(comm, name, sizes):
    """Return {"peak": bytes held and taken by a step on top, "losses": of the first steps}."""
    read = bytes_alone(comm, made, STEPS, name, comm, sizes)
    return {"peak": read["held"] + read["taken"], "losses": read["losses"]}


def times_of(comm, sizes, rounds):
    """Return {name: seconds of each round}."""
    trainers = {name: made(name, comm, sizes) for name in TRAINERS}
    return seconds_of(comm, {name: functools.partial(trainer.step, tokens)
                             for name, (trainer, tokens) in trainers.items()}, rounds, 3)
