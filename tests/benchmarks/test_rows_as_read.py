"""Each bench yields what it has read before it goes on: what was read is on disk when a run is cut."""

import importlib
import itertools
import operator

import pytest
import torch

from benchmarks import compression, zero
from benchmarks.compiler import table
from benchmarks.meter import SMALL, Size

TINY = Size(layers=2, hidden=32, heads=4, vocab_size=64, batch=2, sequence=64)
ON_TWO = {"sizes": (1024, 4096), "worlds": (2,), "seconds": 0.01, "launches": 2, "least_calls": 3}
NAMES = [table.Name("forward", "any", torch.bfloat16, 64, variant) for variant in ("full", "causal")]


class Cut(Exception):
    """Ends a run."""


def after(calls):
    """Let a function be called so many times; the next call cuts the run."""
    def replacement(function):
        count = itertools.count()

        def called(*args, **kwargs):
            if next(count) >= calls:
                raise Cut
            return function(*args, **kwargs)

        return called

    return replacement


def after_launches(count):
    """Put in the place of `launch` what answers for activations and so many launches; the next one cuts the run."""
    read = {"tracker": 1, "held": 1, "resident": 1, "steps": [{"allocator": 1}] * zero.STEPS}
    return lambda _: after(1 + count)(lambda fn, world, what, *args, **options: [
        1.0 if fn is zero.activations_of else dict.fromkeys(what, read)])


def after_splits(count):
    return lambda _: after(count)(lambda *args, **options: [{"peak": 1, "losses": [1.0]}])


def after_reductions(count):
    found = dict.fromkeys([*compression.RATIOS, "whole", "ours", "theirs",
                           *(f"{name} {way}" for name in compression.REDUCED for way in compression.WAYS)], [1.0])
    read = {"loss": 1.0, "bytes": 1}
    return lambda _: after(count)(lambda *args, **options: [found, found] if args[0] in (
        compression.times_of, compression.all_reduces) else [read])


def after_one_kernel(_):
    """Put in the place of the compiler what refuses the first kernel; the second cuts the run."""
    def compile_all(named):
        yield next(iter(named)), RuntimeError("no compiler here")
        raise Cut

    return compile_all


@pytest.mark.parametrize(("bench", "options", "function", "cut", "count"), [
    ("meter", {"size": SMALL}, "byte_rows", after(1), 2),
    ("meter", {"size": SMALL, "rounds": 2}, "time_row", after(1), 4 * 2 + 1),
    ("meter", {"size": SMALL, "rounds": 2}, "dry_rows", after(0), 4 * 2 + 3),
    ("comm", ON_TWO, "launch", after(3), 1), ("comm", ON_TWO, "launch", after(4), 1 + 3),
    ("precision", {"size": SMALL, "rounds": 2}, "peak_of", after(0), 1),
    ("precision", {"size": SMALL, "rounds": 2}, "PrecisionStep.tracked", after(2), 2 + 3 + 2),
    ("accumulation", {"size": TINY}, "peak", after(3), 2),
    ("accumulation", {"size": TINY, "rounds": 2}, "compare", after(1), 4 * 2 + 2),
    ("checkpointing", {"size": TINY}, "compare", after(0), 1),
    ("checkpointing", {"size": TINY, "rounds": 2}, "with_policy", after(1), 6 * 2 + 2),
    ("activations", {"size": TINY, "rounds": 2}, "CompressedStep.peak", after(2), 5 + 3),
    ("activations", {"size": TINY, "rounds": 2, "steps": 2}, "train", after(2), 3 * 19 + 6 + 4 + 1),
    ("sequences", {"size": TINY}, "peak", after(2), 1),
    ("sequences", {"size": TINY, "rounds": 2}, "compare", after(1), 4 + 5 + 4),
    ("zero", {}, "launch", after_launches(1), 1),
    ("zero", {}, "launch", after_launches(8), len(zero.PAIRS) + sum(pair[0] == "Zero3" for pair in zero.PAIRS)),
    ("tensor_parallel", {}, "launch", after_splits(2), 1), ("tensor_parallel", {}, "launch", after_splits(4), 2),
    ("compression", {}, "launch", after_reductions(1), 7), ("compression", {}, "launch", after_reductions(2), 7 + 6),
    ("compression", {}, "launch", after_reductions(4), 7 + 6 + 2),
    ("offload", {"elements": 2**12, "rounds": 2, "models": ()}, "compare", after(3), 3),
    ("offload", {"elements": 2**12, "rounds": 2, "models": ()}, "copy_rows", after(0), 10),
    ("kernels", {"named": {name: table.case(name) for name in NAMES}}, "compile_all", after_one_kernel, 1)])
def test_a_run_that_is_cut_has_yielded_what_it_read(monkeypatch, bench, options, function, cut, count):
    module = importlib.import_module(f"benchmarks.{bench}")
    monkeypatch.setattr(f"{module.__name__}.{function}", cut(operator.attrgetter(function)(module)))
    _, rows = module.run("cpu", **options)
    read = []
    with pytest.raises(Cut):
        for row in rows:
            read.append(row["what"])
    assert len(read) == count, read
