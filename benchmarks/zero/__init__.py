"""Each stage of ZeRO beside torch's: DDP, DDP with ZeroRedundancyOptimizer, and FSDP2 with each block sharded.

Four ranks train a GPT of 14 million parameters; on a machine without a GPU others, too (`models.py`). All have their
defaults. For bytes, one engine after the other is made, run and dropped. For time, all engines take turns. Bytes are
per parameter, on the rank that takes most, as the allocator alone reads them; the tracker, in another step, holds what
is between two steps to that within 1 %.
"""

import functools
import gc
from dataclasses import asdict

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from refimpl import memory
from refimpl.comm import launch
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3
from refimpl.zero.units import blocks

from ..ranks import place_of, seconds_of, slowest
from ..record import row
from ..runner import BAR_DELAY, Comparison
from .models import CONTEXT, LARGE_VOCABULARY, MODELS, TIED, VOCABULARY, available, live_at_peak, names_of

CONFIG = GPTConfig(vocab_size=8192, context_length=64, layers=6, hidden=384, heads=6)
WORLD, ROWS = 4, 1  # ranks, and sequences of a rank in a step
LEARNING_RATE = 1e-4
DDP, REDUNDANCY, FSDP2 = "DistributedDataParallel", "ZeroRedundancyOptimizer + DDP", "FSDP2"
LEAN_DDP, LEAN = f"{DDP}, gradients as views of buckets", f"{REDUNDANCY}, gradients as views of buckets"
APART, ALONE = f"{FSDP2}, embeddings and head apart", "Zero3 without look-ahead"
PAIRS = [("DataParallel", DDP), ("DataParallel", LEAN_DDP), ("Zero1", REDUNDANCY), ("Zero1", LEAN),
         ("Zero2", REDUNDANCY), ("Zero2", LEAN), ("Zero3", FSDP2), (ALONE, FSDP2)]
OF_OTHERS = [("Zero1", LEAN), ("Zero2", LEAN), ("Zero3", FSDP2), (ALONE, FSDP2)]
UNTIED = [("Zero3", APART), (ALONE, APART)]  # and these, where FSDP2 can have the head by itself
# The limits, as multiples of the peer's bytes and time; of what is added to shards and activations, and of the time of
# other models.
BYTES_HELD = {("Zero1", REDUNDANCY): 0.9, ("Zero1", LEAN): 0.95, ("Zero2", LEAN): 0.8, ("Zero3", FSDP2): 0.93,
              ("Zero3", APART): 0.93, (ALONE, FSDP2): 0.87, (ALONE, APART): 0.87}
TIME_HELD = {("Zero1", REDUNDANCY): 1.0, ("Zero1", LEAN): 1.0, ("Zero3", FSDP2): 1.0, ("Zero3", APART): 1.0}
ADDED_HELD = 0.78
KINDS, WARMUP = ("allocator", "tracker", "held", "resident"), 2  # readings of bytes; rounds before those of time
STEPS = 5  # whose peaks are read: FSDP2's have differed by up to 8 %


class Ours:
    """Wraps an engine of `refimpl.zero`. `step(tokens)` makes one training step."""

    def __init__(self, stage, model, comm, **options):
        self.engine = stage(model, comm, functools.partial(torch.optim.AdamW, lr=LEARNING_RATE), **options)
        self.model, self.optimizer = model, self.engine.optimizer

    def step(self, tokens):
        self.engine.backward(self.engine.forward(tokens, tokens))
        self.engine.step()


class Theirs:
    """Wraps DDP or FSDP2, used as torch's documentation shows."""

    def __init__(self, name, model, comm):
        if name in (FSDP2, APART):
            for module in [*blocks(model), *(ends(model) if name == APART else ())]:
                fully_shard(module)
            self.model = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=name in (LEAN_DDP, LEAN))
        if name in (REDUNDANCY, LEAN):
            self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, tokens):
        self.model(tokens, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ends(model):
    """Return a model's embeddings and its head: the layers that are outside of its blocks."""
    inside = {module for block in blocks(model) for module in block.modules()}
    return [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.Linear))
            and module not in inside]


ENGINES = {**{stage.__name__: functools.partial(Ours, stage) for stage in (DataParallel, Zero1, Zero2, Zero3)},
           ALONE: functools.partial(Ours, Zero3, look_ahead=0),
           **{name: functools.partial(Theirs, name) for name in (DDP, LEAN_DDP, REDUNDANCY, LEAN, FSDP2, APART)}}


def run(device="cpu", config=CONFIG, world=WORLD, rounds=7, models=None):
    """Measure bytes per parameter and seconds of a step of every engine: (settings, rows). `models`: names of others,
    by default all on a machine without a GPU, which would say nothing new of them."""
    models = (() if torch.cuda.is_available() else available()) if models is None else models
    device = place_of(world, device)
    settings = {"model": asdict(config), "parameters": config.parameter_count(), "dtype": "fp32", "ranks": world,
                "sequences of a rank": ROWS, "tokens on": device, "rounds": rounds, "optimizer": "AdamW",
                "other models": list(models),
                "peak": "bytes held before a step and what it takes on top, without the tokens, on the rank that takes "
                        f"most; of {STEPS} steps our highest and the peer's lowest",
                "added": "the peak without 16 bytes a parameter in shards, and without the activations of a forward"}
    return settings, all_rows(device, config, world, rounds, models)


def all_rows(device, config, world, rounds, models=()):
    """Yield the rows of bytes pair by pair, then those of time; then of each other model."""
    yield from byte_rows(device, config, world)
    yield from timed_rows(device, config, world, rounds, PAIRS)
    for model in models:
        pairs = OF_OTHERS if model.startswith(TIED) else [*OF_OTHERS, *UNTIED]
        yield from byte_rows(device, model, world, pairs, f", {model}")
        if str(LARGE_VOCABULARY) not in model.replace(",", ""):
            yield from timed_rows(device, model, world, (rounds + 1) // 2, pairs[2:], f", {model}")


def byte_rows(device, config, world, pairs=PAIRS, of=""):
    """Yield a row for each pair: the peak of a step beside the peer's, and the bytes held between two steps; of stage 3
    also what it adds to shards and activations. Each engine is measured once, for its first pair; those of another
    model in the same ranks, since each launch imports transformers, but for FSDP2: its peak depends on when reductions
    end. With a large vocabulary the tables rule, and nothing is promised."""
    held, promised = {}, str(LARGE_VOCABULARY) not in of.replace(",", "")
    base = 16 / world + launch(activations_of, 1, config, device=device, timeout=300)[0]
    for pair in tqdm(pairs, "bytes", delay=BAR_DELAY, leave=False):
        names = pair if isinstance(config, GPTConfig) else [name for each in pairs for name in each]
        names = [name for name in dict.fromkeys(names) if name not in held]
        fsdp2 = [name for name in names if name in (FSDP2, APART)]
        for group in ([name for name in names if name not in fsdp2], *([name] for name in fsdp2)):
            held |= bytes_held(group, device, config, world) if group else {}
        ours, theirs = (held[name] for name in pair)
        yield row(f"peak of a step, {pair[0]}{of}", pair[1], "B/parameter", ours["allocator"], theirs["allocator"],
                  bound=BYTES_HELD.get(pair) if promised else None, ours=ours, theirs=theirs)
        if pair[0] == "Zero3":
            yield row(f"added to shards and activations, Zero3{of}", pair[1], "B/parameter", ours["allocator"] - base,
                      theirs["allocator"] - base, bound=ADDED_HELD if promised else None)


def bytes_held(names, device, config, world):
    """Launch ranks with these engines, one after the other; return {engine: what `bytes_of` read, per parameter, on the
    rank that takes most}: "allocator" in the one of `STEPS` steps that speaks most for a peer and least for us. In
    "live": the largest tensors at that peak, {bytes of one: bytes of all such}; in "names": what in the model has these
    sizes.

    RuntimeError if on a CPU the instruments differ by over 1 % on what is held: then one has missed something.
    """
    ranks, found = launch(bytes_of_each, world, names, config, device=device, timeout=600), {}
    count = parameters_of(config)
    for name in names:
        answers = [rank[name] for rank in ranks]
        for rank in answers:
            if device == "cpu" and abs(rank["held"] - rank["resident"]) > 0.01 * rank["resident"]:
                raise RuntimeError(f"{name}: between two steps the allocator holds {rank['held']:,} bytes, the tracker "
                                   f"{rank['resident']:,}: expected the same within 1 %")
        steps = [max((rank["steps"][i] for rank in answers), key=lambda step: step["allocator"]) for i in range(STEPS)]
        chosen = (max if ENGINES[name].func is Ours else min)(steps, key=lambda step: step["allocator"])
        live = {size: nbytes / count for size, nbytes in chosen.get("live", {}).items()}
        most = {key: max(rank[key] for rank in answers) for key in KINDS if key != "allocator"}
        most["allocator"] = chosen["allocator"]
        found[name] = {**{key: nbytes / count for key, nbytes in most.items()}, "live": live,
                       "names": {size: what for size, what in answers[0].get("names", {}).items() if size in live}}
    return found


def timed_rows(device, config, world, rounds, pairs, of=""):
    """Measure the engines of these pairs in turns, and return the rows of a step's seconds beside the peer's."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    timing = Comparison(slowest(launch(times_of, world, config, rounds, names, device=device, timeout=900)))
    return [timing.row(f"step, {name}{of}", name, peer, paired=timing.paired(name, peer),
                       bound=TIME_HELD.get((name, peer))) for name, peer in pairs]


# --- in a rank -------------------------------------------------------------------------------------------------------


def build(config, device="cpu"):
    """Build the GPT of a GPTConfig, or another model by its name."""
    return GPT(config, device=device) if isinstance(config, GPTConfig) else MODELS[config]().to(device)


def parameters_of(config):
    """Return the number of parameters of what `build` makes."""
    if isinstance(config, GPTConfig):
        return config.parameter_count()
    with torch.device("meta"):
        return sum(p.numel() for p in MODELS[config]().parameters())


def tokens_of(config, rank, device):
    """Return a rank's tokens, (ROWS, sequence)."""
    torch.manual_seed(rank)
    vocabulary, length = ((config.vocab_size, config.context_length) if isinstance(config, GPTConfig)
                          else (VOCABULARY, CONTEXT))
    return torch.randint(0, vocabulary, (ROWS, length), device=device)


def made(name, comm, config):
    """Make (engine, tokens) on the rank's device."""
    torch.manual_seed(0)
    return ENGINES[name](build(config, comm.device), comm), tokens_of(config, comm.rank, comm.device)


def activations_of(comm, config):
    """Return the bytes per parameter that a forward in one process leaves for its backward."""
    model, tokens = build(config, comm.device), tokens_of(config, 0, comm.device)
    model(tokens, tokens).backward()
    with memory.measure(comm.device) as forward:
        loss = model(tokens, tokens)
    del loss
    return forward.net / parameters_of(config)


def bytes_of_each(comm, names, config):
    """Return {engine: what `bytes_of` returns} of engines that are made, run and dropped one after the other."""
    found = {}
    for name in names:
        found[name] = bytes_of(comm, name, config)
        gc.collect()
        comm.barrier()
    return found


def bytes_of(comm, name, config):
    """Return {"tracker": peak of a step, "held" and "resident": between two steps, by each instrument}, in bytes, and
    "steps": [{"allocator": the step's peak}]; on a CPU also "names", and "live" of each step, see `zero_items`."""
    with memory.measure(comm.device) as before:
        engine, tokens = made(name, comm, config)
        for _ in range(2):
            engine.step(tokens)
        comm.barrier()  # until gloo's threads are idle: PyTorch's profiler may crash if it ends while one frees
    steps = []
    for _ in range(STEPS):
        with memory.measure(comm.device) as step:
            engine.step(tokens)
            comm.barrier()
        steps.append(step)
    with memory.track(engine.model, engine.optimizer) as t:
        engine.step(tokens)
    held, resident = before.net - tokens.nbytes, t.now.total - tokens.nbytes
    found = {"tracker": t.peak.total - tokens.nbytes, "held": held, "resident": resident}
    if comm.device.type == "cuda":
        return {**found, "steps": [{"allocator": held + step.peak} for step in steps]}
    with torch.device("meta"):
        names = names_of(build(config, "meta"), comm.world_size, *tokens.shape)
    return {**found, "names": names, "steps": [{"allocator": held + step.peak, "live": live_at_peak(step.events)}
                                               for step in steps]}


def times_of(comm, config, rounds, names):
    """Return {engine: seconds of each round}."""
    engines = {name: made(name, comm, config) for name in names}
    return seconds_of(comm, {name: functools.partial(engine.step, tokens)
                             for name, (engine, tokens) in engines.items()}, rounds, WARMUP)
