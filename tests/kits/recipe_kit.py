"""What tests of recipes share: values of each field, rows that hold each pair of them, a plain step to compare with."""

import functools
import gc
import itertools
import math
import random
import tempfile
from dataclasses import fields
from unittest import mock

import torch
from outside.models import GROUPED, causal

from refimpl import memory
from refimpl.attention import sparse, tiled_attention
from refimpl.engine import Recipe, build, building
from refimpl.engine.building import dry_recipe
from refimpl.engine.recipe_rules import RULES
from refimpl.model import GPT, GPTConfig

LLAMA = causal("llama", **GROUPED | {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64,
                                     "vocab_size": 64, "max_position_embeddings": 64})
CONFIG = GPTConfig(vocab_size=64, context_length=32, layers=4, hidden=32, heads=4)
ROWS, STEPS, RANKS = 8, 3, 4

# Of each field the values that mean something, the default first. What follows from another field is in `completed`.
VALUES = {
    "precision": ["fp32", "autocast", "bf16", "fp16"], "micro_batches": [1, 4],
    "recompute": ["none", "blocks", "attention", "attention core", "mlp", 2, 0.5],
    "activations": ["kept", "lossless", "bf16", "int8", "host"], "mlp": ["plain", "hidden", "input"],
    "attention": ["auto", "tiles"], "window": [None, 16], "loss": ["logits", "chunked"],
    "optimizer": ["adamw", "adamw-fused", "adam", "momentum", "sgd"], "zero": [1, 0, 2, 3],
    "store": ["device", "host", "disk"], "update": ["device", "host"], "bucket_bytes": [None, 4096],
    "look_ahead": [1, 2], "in_flight_bytes": [None, 4096], "reduce_dtype": [None, "fp32", "bf16"],
    "compression": ["none", "topk", "threshold", "random", "int8", "sign", "powersgd"],
    "gathers": ["whole", "int8", "int4"], "dp": [1, 2], "shards": [None, 1], "tp": [1, 2], "sequence": [False, True],
    "pp": [1, 2], "cp": [1, 2], "context": ["ring", "ulysses", "gathered"],
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "interleaved-zero-bubble", "zb-v", "dualpipe-v"],
    "style": ["parameters", "uniform"],
}
DEFAULTS = {each.name: each.default for each in fields(Recipe)}
NEEDS = {("look_ahead", 2): {"zero": 3}, ("gathers", "int8"): {"zero": 3}, ("gathers", "int4"): {"zero": 3},
         ("sequence", True): {"tp": 2}, ("shards", 1): {"dp": 2}, ("context", "ulysses"): {"cp": 2},
         ("context", "gathered"): {"cp": 2}, ("store", "disk"): {"folder": "a folder"},
         **{("compression", name): {"dp": 2} for name in VALUES["compression"][1:]},
         **{("schedule", name): {"pp": 2, "micro_batches": 4} for name in VALUES["schedule"][1:]}}


def refusals(values):
    """The Rules that a recipe of these values breaks, of fields that are all given or have their default."""
    class Given:
        def __getattr__(self, name):
            return values.get(name, DEFAULTS[name])

    return [rule for rule in RULES if rule.holds(Given())]


def completed(values):
    """Values with what they need: None if two of them need different things."""
    found = dict(values)
    for each in values.items():
        for name, value in NEEDS.get(each, {}).items():
            if found.setdefault(name, value) != value:
                return None
    return found


def pairs():
    """All pairs of values of two fields, neither the default: [{field: value, field: value}]."""
    for (one, ones), (two, twos) in itertools.combinations(VALUES.items(), 2):
        for a, b in itertools.product(ones[1:], twos[1:]):
            yield {one: a, two: b}


def world_of(values):
    return math.prod(values.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))


def fits(values):
    """The whole values of a recipe that has these and composes, or None."""
    whole = completed(values)
    return None if whole is None or refusals(whole) or world_of(whole) > RANKS else whole


def of(values):
    """The pairs of two fields' values, neither the default, that a recipe tries."""
    given = [(name, value) for name, value in values.items() if name in VALUES and value != VALUES[name][0]]
    return {frozenset(pair) for pair in itertools.combinations(given, 2)}


@functools.cache
def covering(seed=1):
    """Recipes of at most RANKS ranks that together hold each pair of values that composes: the first pair that is left,
    and of each other field the value that brings most pairs that are left."""
    chance, rows = random.Random(seed), []
    left = {frozenset(pair.items()): pair for pair in pairs() if fits(pair)}
    while left:
        row = fits(next(iter(left.values())))
        for name in chance.sample([*VALUES], len(VALUES)):
            if name not in row:
                tried = [whole for value in VALUES[name][1:] if (whole := fits(row | {name: value}))]
                row = max(tried, key=lambda whole: len(of(whole) & left.keys()), default=row)
        rows.append(row)
        for pair in of(row):
            left.pop(pair, None)
    return rows


def in_pytorch(function):
    """Let a function's models attend by PyTorch's operations, though Triton's interpreter is on in this process."""
    @functools.wraps(function)
    def call(*args, **options):
        with mock.patch.multiple(building, flash_attention=tiled_attention,
                                 sparse=functools.partial(sparse, kernel="tiled")):
            return function(*args, **options)

    return call


@in_pytorch
def trained(comm, values, steps=STEPS, make=lambda: GPT(CONFIG)):
    """(losses, bytes at the highest moment of the last step by category) of a recipe on a rank of `comm`, or alone."""
    with tempfile.TemporaryDirectory() as folder, memory.track() as t:
        recipe = Recipe(**values | ({"folder": folder} if values.get("store") == "disk" else {}))
        torch.manual_seed(0)
        engine, found = build(recipe, make(), comm), []
        gc.collect()  # the whole model, which the callers of `together` hold until they return, has cycles
        place, chance = engine.mesh.here["dp"], torch.Generator().manual_seed(1)
        for _ in range(steps):
            text = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.context_length + 1), generator=chance)
            mine = text.chunk(recipe.dp)[place]
            given = [x.contiguous() if needed else None
                     for x, needed in zip((mine[:, :-1], mine[:, 1:]), engine.needs, strict=True)]
            del text, mine
            began = len(t.timeline)
            found.append(engine.train_step(*given).item())
            engine.clip_grad_norm_(1.0)
            engine.step()
        close = getattr(engine.engine._stored.store, "close", None)
        if close is not None:
            close()
    return found, dict(max((each.ledger for each in t.timeline[began - 1:-1]), key=lambda each: each.total))


@functools.cache
def plain(precision, window, optimizer, make=None):
    """Losses of one process without any technique, but for what decides numbers."""
    given = {"precision": precision, "window": window, "optimizer": optimizer}
    return trained(None, given, **{} if make is None else {"make": make})[0]


def far(values, losses, make=None):
    """How far losses are from the plain ones, and how far they may be: rounding, more of it in 16 bits, and what a
    technique that rounds on purpose does to such small steps."""
    numbers = [values.get(name, DEFAULTS[name]) for name in ("precision", "window", "optimizer")]
    away = max(abs(a - b) for a, b in zip(losses, plain(*numbers, make), strict=True))
    rounds = {"compression", "gathers", "reduce_dtype"} & values.keys() or values.get("activations") in ("bf16", "int8")
    return away, 2e-2 if rounds else 1e-3 if numbers[0] != "fp32" else 2e-5


@in_pytorch
def asked(values, rank=0, make=lambda: GPT(CONFIG)):
    """Bytes at the highest moment of a step of a recipe's rank by category, by a dry run."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(**values | ({"folder": folder} if values.get("store") == "disk" else {}))
        return dict(dry_recipe(recipe, make, ROWS // recipe.dp, CONFIG.context_length, rank=rank).peak)
