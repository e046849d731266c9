"""What several tests share: a small GPT, and a step to train it."""

import fnmatch
import functools
import gc
import importlib.util
import os
import sys
import tomllib
from pathlib import Path

import pytest
import torch

# Triton decides when it is imported, by anything at all: without a GPU its kernels are run by its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import quick_interpreter

    quick_interpreter.quicken()

from refimpl import memory
from refimpl.model import GPT, GPTConfig

# On a busy machine threads that wait for each other take a hundred times as long as one that does all the work.
torch.set_num_threads(1)

# How long an example takes is the machine's affair. What is held against the clock has the marker `alone`.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

# Parts of the suite, by file or function, for `pytest -m core` and the like; without -m everything runs.
CORE = tomllib.loads((Path(__file__).parent / "core.toml").read_text())
PARTS = {
    "core": (CORE["papers"], CORE["floors"], *sum((*CORE["techniques"].values(), *CORE["ground"].values()), [])),
    "faults": ("*/test_faults.py", "*/test_retries.py", "*/test_durable.py", "*/test_refused.py", "*_refused.py",
               "ranks/test_watch.py", "ranks/test_forking.py", "ranks/test_forkserver.py", "test_gpu_command.py"),
    "peers": ("bench/*", "zero/test_users_models.py", "zero/test_stages.py", "memory/test_programs.py",
              "checkpointing/test_region.py"),
}


def pytest_collection_modifyitems(items):
    """Mark each test with the parts that its file, or its function, belongs to: of a core one the last case, which by
    our habit is the fullest, as the highest stage on the most ranks."""
    here = Path(__file__).parent
    parts = functools.cache(lambda name: [part for part, patterns in PARTS.items()
                                          if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)])
    core = {}
    for item in items:
        if item.path.is_relative_to(here):
            file = item.path.relative_to(here).as_posix()
            function = f"{file}::{getattr(item, 'originalname', '')}"
            found = {*parts(file), *parts(function)}
            if "core" in found:
                core[function] = item
            for part in found - {"core"}:
                item.add_marker(part)
    for item in core.values():
        item.add_marker("core")


def pytest_collection_finish():
    """What is imported and collected by now stays until the end: a search for garbage need not look at it each time, of
    which each reading of an allocator makes one."""
    importlib.import_module("torch._dynamo")  # the first optimizer would
    gc.collect()
    gc.freeze()
    gc.enable()
    if not torch.cuda.is_available():  # what an import does to a driver, a fork inherits
        from refimpl.ranks import forkserver

        forkserver.PRELOADED += imported_by_ranks()


def imported_by_ranks():
    """Return the modules that tests have imported by now, and that the process which forks ranks imports once for all:
    in each rank transformers would take 1.7 s of a core, and refimpl.zero 0.17 s."""
    names = [name for name in sys.modules if name.split(".")[0] in ("refimpl", "outside", "peft")
             and not name.startswith(("benchmarks", "exercises", "refimpl.cli"))]
    if "outside.models" in names:
        names += ["timm", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
    if "adapters_kit" in sys.modules:
        names += ["peft"]
    return tuple(names)


gc.disable()  # until all is collected: it would look at each of the modules and tests made so far, over and over

SMALL = GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=32, heads=4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def trained():
    """(model, optimizer, step): `step()` is one forward, backward and AdamW step on 2×32 tokens."""
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 32))

    def step():
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


@pytest.fixture
def trace(trained):
    """The trace of a first step of `trained`."""
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    return t
