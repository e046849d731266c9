"""Pipeline parallelism beside torch.distributed.pipelining, schedule by schedule, on one plain model cut the same way.

Four ranks train a decoder of 10 million parameters in 8 micro-batches. For time, ours and torch's take turns in the
same ranks, step by step. For bytes, each runs alone in its own ranks: what a rank holds before a step and what the step
takes on top, as the allocator alone reads it; a row has the rank on which ours takes most beside torch's. Losses agree,
or the reading ends with an error. On a machine with fewer cores than ranks, one that waits gives its core to another:
idle time hides, and what is compared is what each does besides computing.
"""

import functools

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional as F
from tqdm import tqdm

from refimpl.comm import launch
from refimpl.pipeline import PipelineParallelStage, schedule

from .ranks import bytes_alone, check_losses, place_of, seconds_of, slowest
from .record import row
from .runner import BAR_DELAY, Comparison
from .tensor_parallel import Decoder

SIZES = {"vocabulary": 8192, "context": 128, "layers": 8, "hidden": 256, "heads": 8}
WORLD, MICRO_BATCHES, STEPS = 4, 8, 2  # ranks, micro-batches of one sequence each, steps whose losses are compared
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
         "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble",
         "dualpipe-v": "ScheduleDualPipeV"}
TIME_HELD = dict.fromkeys(PEERS, 0.95) | {"1f1b": 1.0, "dualpipe-v": 1.0}  # multiples of the peer's
BYTES_HELD = 1.0


class Stage(nn.Module):
    """Some blocks of a Decoder; tokens come in at the first one, logits go out at the last."""

    def __init__(self, model, stage, stages):
        super().__init__()
        size = len(model.blocks) // stages
        first, last = stage == 0, stage == stages - 1
        self.embedding, self.positions = (model.embedding, model.positions) if first else (None, None)
        self.blocks = model.blocks[size * stage : size * (stage + 1)]
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, targets):
    """Return the mean loss of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """Trains this rank's stages of a Decoder. `step(tokens)` returns the loss on the last stage's rank, else 0."""

    def __init__(self, name, comm, sizes):
        torch.manual_seed(0)
        self.plan = schedule(name, comm.world_size, MICRO_BATCHES)
        model = Decoder(**sizes)
        self.stages = {s: Stage(model, s, self.plan.stages).to(comm.device) for s in self.plan.stages_of(comm.rank)}
        del model
        self.optimizer = torch.optim.AdamW([p for stage in self.stages.values() for p in stage.parameters()])

    def step(self, tokens):
        loss = self.backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Ours(Trainer):
    """The executor of `refimpl.pipeline`."""

    def __init__(self, name, comm, sizes):
        super().__init__(name, comm, sizes)
        self.pipe = PipelineParallelStage(self.stages, comm, self.plan, loss=loss_of)

    def backward(self, tokens):
        loss = self.pipe.train_step(tokens, tokens)
        return 0.0 if loss is None else loss.item()


class Theirs(Trainer):
    """torch's, with `return_outputs=False`: else its last rank holds the outputs of all micro-batches."""

    def __init__(self, name, comm, sizes):
        super().__init__(name, comm, sizes)
        parts = [pipelining.PipelineStage(module, s, self.plan.stages, comm.device, **self.known(s, sizes))
                 for s, module in self.stages.items()]
        kind = getattr(torch_schedules, PEERS[name])
        single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        self.schedule = kind(parts[0] if single else parts, MICRO_BATCHES, loss_fn=loss_of)
        self.first, self.last = 0 in self.stages, self.plan.stages - 1 in self.stages

    def known(self, stage, sizes):
        """Return what torch is told of a stage's tensors. Of nothing, its ranks ask each other in the first step."""
        return {}

    def backward(self, tokens):
        losses = []
        given = {"target": tokens, "losses": losses} if self.last else {}
        self.schedule.step(*[tokens] * self.first, **given, return_outputs=False)
        return sum(loss.item() for loss in losses) / MICRO_BATCHES


def run(device="cpu", sizes=SIZES, world=WORLD, rounds=9):
    """Measure the seconds of a step and the peak of each schedule: (settings, rows)."""
    device = place_of(world, device)
    settings = {"model": sizes, "parameters": sum(p.numel() for p in Decoder(**sizes).parameters()), "dtype": "fp32",
                "ranks": world, "micro-batches": MICRO_BATCHES, "tokens on": device, "rounds": rounds,
                "optimizer": "AdamW"}
    return settings, all_rows(device, sizes, world, rounds)


def all_rows(device, sizes, world, rounds):
    """Yield the rows of time, then those of bytes. RuntimeError if losses differ."""
    for name in tqdm(PEERS, "seconds", delay=BAR_DELAY, leave=False):
        timing = Comparison(slowest(launch(times_of, world, name, sizes, rounds, device=device, timeout=300)))
        yield timing.row(f"step, {name}", "ours", "theirs", called=peer_of(name), bound=TIME_HELD[name],
                         paired=timing.paired("ours", "theirs"))
    for name in tqdm(PEERS, "bytes", delay=BAR_DELAY, leave=False):
        ours, theirs = (launch(bytes_of, world, kind, name, sizes, device=device, timeout=300)
                        for kind in TRAINERS)
        losses = ([sum(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
                  for ranks in (ours, theirs))
        check_losses(name, next(losses), peer_of(name), next(losses))
        peaks = [(mine["peak"] / 1e6, other["peak"] / 1e6) for mine, other in zip(ours, theirs, strict=True)]
        worst = max(range(world), key=lambda rank: peaks[rank][0] / peaks[rank][1])
        yield row(f"peak of a step, {name}", peer_of(name), "MB", *peaks[worst], bound=BYTES_HELD, rank=worst,
                  ranks=[round(mine / other, 3) for mine, other in peaks])


def peer_of(name):
    """Return what a row calls torch's schedule."""
    return f"torch.distributed.pipelining, {PEERS[name]}"


# --- in a rank -------------------------------------------------------------------------------------------------------

TRAINERS = {"ours": Ours, "theirs": Theirs}


def made(kind, name, comm, sizes):
    """Make (trainer, tokens), the same on all ranks."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(sizes["vocabulary"], (MICRO_BATCHES, sizes["context"]), generator=generator)
    return TRAINERS[kind](name, comm, sizes), tokens.to(comm.device)


def bytes_of(comm, kind, name, sizes):
    """Return {"peak": bytes held and taken by a step on top, "losses": of the first steps}."""
    read = bytes_alone(comm, made, STEPS, kind, name, comm, sizes)
    return {"peak": read["held"] + read["taken"], "losses": read["losses"]}


def times_of(comm, name, sizes, rounds):
    """Return {kind: seconds of each round}."""
    trainers = {kind: made(kind, name, comm, sizes) for kind in TRAINERS}
    return seconds_of(comm, {kind: functools.partial(trainer.step, tokens)
                             for kind, (trainer, tokens) in trainers.items()}, rounds, 2)
