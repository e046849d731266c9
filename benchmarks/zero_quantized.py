"""Quantised gather and reduce of ZeRO-3 beside the collectives they replace: bytes, memory, error, losses, seconds.

Four ranks, two to a machine, train a small GPT and a small Llama of transformers on real text for 80 steps, with and
without. Losses differ by chance, too: so there are three seeds, of first weights and of the order of the text, and for
each a control, whole numbers whose first weights are off by as much as int8 rounds them. Bytes are those of a step;
error that of one step's mean gradient, and of gathered parameters. For time, steps over a link of 10 MB/s take turns.
On a GPU the codec's kernels are timed beside plain torch, and no losses are read, which are those of a CPU.
"""

import functools
import statistics

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.comm import FakeCommunicator, Link, launch
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero3
from refimpl.zero.quantized import BlockCodec, QuantizedReduce

from .outside import kit
from .ranks import seconds_of, slowest
from .record import row
from .runner import BAR_DELAY, Comparison, compare

SIZES = {"vocab_size": 256, "context_length": 32, "layers": 2, "hidden": 64, "heads": 4}
RANKS, STEPS, ROWS, LAST = 4, 80, 2, 20  # steps, sequences of a rank, steps whose losses are averaged
OFF = 0.006  # of each first weight of the control, as much as int8 rounds it
SEEDS, CONTROL = 3, f"whole, first weights off by {OFF}"
# Without warm-up and at 3e-3 losses were 1.01 to 1.04 of those with whole numbers here, 0.95 to 1.02 in another run.
ADAMW, WARMUP = functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99)), 20
INT8, INT4 = BlockCodec(), BlockCodec(4, 64)
# name → (codec of parameters, that of gradients, ranks of a machine)
WAYS = {"whole": (None, None, None), "weights int8": (INT8, None, None), "gradients int8": (None, INT8, None),
        "both int8": (INT8, INT8, None), "weights int8, gradients int4 on two levels": (INT8, INT4, 2)}
WITHIN = 1.01  # of the loss without codecs, in the mean of the seeds
LINK = Link(10e6, 1e-3)
LAYERS, WIDTH = 6, 512  # of the stack whose peak is read
NUMBERS = 2**26  # of a unit whose codec is timed on a GPU
MODELS = ("gpt", "llama")


def run(device="cpu", steps=STEPS, rounds=7, models=MODELS, seeds=SEEDS):
    """Return (settings, rows)."""
    models = [] if device == "cuda" else models
    parameters = {name: sum(p.numel() for p in model_of(name).parameters()) for name in models}
    settings = {**SIZES, "parameters": parameters, "ranks": RANKS, "steps": steps, "seeds": seeds,
                "sequences": ROWS, "ways": {name: str(way) for name, way in WAYS.items()}, "link": str(LINK)}
    return settings, codec_rows(rounds) if device == "cuda" else all_rows(steps, rounds, models, seeds)


def all_rows(steps, rounds, models, seeds=SEEDS):
    """Yield the rows of a CPU: memory, seconds, errors, then bytes and losses of each model."""
    peaks = {name: peak_of(*way[:2]) for name, way in WAYS.items()}
    for name in list(WAYS)[1:]:
        yield row(f"peak of a step above shards, {name}", "whole", "B/parameter of a layer", peaks[name],
                  peaks["whole"])
    timing = Comparison(slowest(launch(times_of, RANKS, WAYS, rounds, device="cpu", timeout=None)))
    for name in list(WAYS)[1:]:
        yield row(f"step over 10 MB/s, {name}", "whole", "s", timing.median(name), timing.median("whole"),
                  paired=timing.paired(name, "whole"))
    for model in models:
        yield from learning_rows(model, steps, seeds)


def learning_rows(model, steps, seeds):
    """Yield the rows of one model's losses, then of its bytes and errors.

    Of a loss: `value` and `peer_value` are means of the seeds; `changes`: the loss over that with whole numbers, less
    one, of each seed; `spread`: the standard deviation of the losses with whole numbers, as a part of their mean.
    """
    losses, first = launch(learned, RANKS, model, steps, seeds, WAYS, device="cpu", timeout=None)[0]
    whole = losses.pop("whole")
    spread = statistics.stdev(whole) / statistics.mean(whole) if seeds > 1 else None
    for name, ours in losses.items():
        changes = [one / other - 1 for one, other in zip(ours, whole, strict=True)]
        yield row(f"loss of {model} after {steps} steps, {name}", "whole", "nats", statistics.mean(ours),
                  statistics.mean(whole), changes=changes, spread=spread, held=None if name == CONTROL else WITHIN)
    whole = first.pop("whole")
    for name, ours in first.items():
        yield row(f"bytes of a step of {model}, {name}", "whole", "kB", ours["bytes"] / 1e3, whole["bytes"] / 1e3)
        yield row(f"error of {model}'s first mean gradient, {name}", "gradient", "norm",
                  (ours["gradient"] - whole["gradient"]).norm().item(), whole["gradient"].norm().item())


def model_of(name, seed=0):
    """Build "gpt" or transformers' "llama", which needs a checkout and the test extra; the same each time."""
    torch.manual_seed(seed)
    if name == "gpt":
        return GPT(GPTConfig(**SIZES))
    *_, models = kit()
    return models.causal(
        "llama", vocab_size=SIZES["vocab_size"], hidden_size=SIZES["hidden"], intermediate_size=2 * SIZES["hidden"],
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"], num_key_value_heads=2)()


def engine_of(model, comm, way, **options):
    """Make a Zero3 that gathers and reduces in this way."""
    weights, gradients, machine = way
    hook = None if gradients is None else QuantizedReduce(gradients, machine)
    return Zero3(model, comm, ADAMW, quantized_weights=weights, hook=hook, **options)


def learned(comm, name, steps, seeds, ways):
    """Return ({way: losses of the seeds}, with the control, and {way: what `first_steps` returns})."""
    torch.set_num_threads(1)
    runs = [(each, seed) for seed in range(seeds) for each in (*ways, CONTROL)]
    losses = {each: [] for each in (*ways, CONTROL)}
    for each, seed in tqdm(runs, name, delay=BAR_DELAY, leave=False, disable=comm.rank > 0):
        losses[each].append(loss_by(comm, name, steps, ways["whole" if each == CONTROL else each], seed,
                                    OFF * (each == CONTROL)))
    return losses, {each: first_steps(comm, name, way) for each, way in ways.items()}


def loss_by(comm, name, steps, way, seed, off=0.0):
    """Train on text; return the mean loss of the last steps over all ranks. The model is one unit: its numbers are the
    same, and fewer collectives are sooner done."""
    model = model_of(name, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + off * torch.randn_like(p))
    engine = engine_of(model, comm, way, units=[model])
    losses = [loss for loss, _ in steps_of(engine, comm, name, steps, seed)]
    return comm.all_reduce(torch.stack(losses), "avg")[-LAST:].mean().item()


def first_steps(comm, name, way):
    """Return the bytes of a step, the second, and the whole mean gradient of the first one."""
    engine, gradients = engine_of(model_of(name), comm, way), []

    def keep(engine):
        if not gradients:
            gradients.append(torch.cat([comm.all_gather(engine.update.gradients[bucket]) for bucket in engine.buckets]))

    *_, (_, sent) = steps_of(engine, comm, name, 2, 0, keep)
    return {"bytes": sent, "gradient": gradients[0]}


def steps_of(engine, comm, name, steps, seed, before_update=lambda engine: None):
    """Make training steps on text in the order of `seed`; yield (loss, bytes sent) of each."""
    warmup = torch.optim.lr_scheduler.LinearLR(engine, 1 / WARMUP, total_iters=WARMUP)
    batches = TextData().batches(ROWS, SIZES["context_length"], rank=comm.rank, world_size=comm.world_size,
                                 epochs=None, seed=seed)
    for _, (x, y) in zip(range(steps), batches, strict=False):
        before = comm.traffic.total
        loss = engine(x, y) if name == "gpt" else engine(input_ids=x, labels=x, use_cache=False).loss
        engine.backward(loss)
        before_update(engine)
        engine.step()
        warmup.step()
        yield loss.detach(), comm.traffic.total - before


def times_of(comm, ways, rounds):
    """Return {way: seconds of each round} of a step over the link."""
    torch.set_num_threads(1)
    comm.link = LINK
    tokens = torch.randint(0, 256, (ROWS, SIZES["context_length"]))

    def step(engine):
        engine.backward(engine(tokens, tokens))
        engine.step()

    steps = {name: functools.partial(step, engine_of(model_of("gpt"), comm, way)) for name, way in ways.items()}
    times = seconds_of(comm, steps, rounds)
    comm.link = None
    return times


def peak_of(weights, gradients):
    """Return what a step of a stack of layers takes above its shards at its peak, by the parameters of one layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = engine_of(model, FakeCommunicator(0, RANKS), (weights, gradients, None))
    for _ in range(3):  # the first learns the order, and the second makes the optimizer's state
        with memory.track(model, engine.optimizer) as t:
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
            engine.step()
    return (t.peak.total - t.start.total) / WIDTH**2


def codec_rows(rounds):
    """Yield the seconds of each kernel on a GPU beside plain torch, and the rate at which it reads and writes."""
    for dtype in (torch.bfloat16, torch.float32):
        for codec in (INT8, INT4):
            x = torch.randn(1, NUMBERS, device="cuda").to(dtype)
            payload = torch.empty(1, codec.payload_bytes(NUMBERS), dtype=torch.uint8, device="cuda")
            by = {"triton": codec, "torch": BlockCodec(codec.bits, codec.block, kernel="torch")}
            for what, arguments in {"encode": (x, payload), "decode": (payload[None], x)}.items():
                found = compare({name: functools.partial(getattr(each, what), *arguments)
                                 for name, each in by.items()}, rounds=rounds)
                yield row(f"{what} {NUMBERS / 1e6:.0f}M numbers, {str(dtype)[6:]}, int{codec.bits}", "plain torch", "s",
                          found.median("triton"), found.median("torch"),
                          rate=(x.nbytes + payload.nbytes) / found.median("triton"))
