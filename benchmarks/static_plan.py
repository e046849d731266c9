"""Static plans beside the least that any allocator needs, beside PyTorch's allocator, and on MiniMalloc's problems.

    plan         the arena's bytes beside the most that is live, on training steps; seconds for 7,000 tensors
    caching      what PyTorch's allocator would have reserved for the same step
    MiniMalloc   bytes that a plan needs beside the capacity that suffices: greedy, and by search (None: not found)
    step         a step in its arena beside the same step: seconds, and bytes outside of the arena
    capacity     the least memory with which a program runs: one pool, with regions for what lives long, with moves

Bytes are simulated, and the same on every machine; seconds of the search are the processor's.
"""

import random
import time

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.allocator import AllocationTrace, plan_static, replay
from refimpl.allocator.contiguous_region import RegionPool
from refimpl.allocator.defragment import CompactingPool
from refimpl.allocator.free_list import PlannedPool
from refimpl.allocator.static import Arena, execute, load_problem, problem_names, record_step, solve, without_out
from refimpl.allocator.static.static_plan import PLACEMENTS
from refimpl.common.allocations import Maker
from refimpl.model import GPT, GPTConfig

from . import outside
from .allocator import least_capacity
from .record import row
from .runner import BAR_DELAY, compare
from .traces import trace_of

PLAN_BOUND, SECONDS_BOUND, TENSORS = 1.005, 2.0, 7000
SECONDS = 60.0  # of the search on each of MiniMalloc's problems
PROGRAMS = ("recomputation, varying length", "ZeRO-3, gathers and releases")
SHAPE = {"vocab_size": 4096, "context_length": 256, "hidden": 256, "heads": 4}


def run(device="cpu", seconds=SECONDS, programs=PROGRAMS, problems=None, models=None, rounds=9):
    """Make all readings: (settings, rows). On a GPU only those that differ there."""
    if torch.device(device).type == "cuda":
        programs, problems, models = (), (), ("our GPT, 4 layers",)
    problems = problem_names() if problems is None else problems
    settings = {"seconds a problem": seconds, "model": SHAPE, "batch": [4, 256], "optimizer": "AdamW",
                "rounds": rounds}
    return settings, all_rows(device, seconds, programs, problems, models, rounds)


def all_rows(device, seconds, programs, problems, models, rounds):
    """Yield the rows in the order above."""
    for name, step in steps().items():
        if models is None or name in models:
            yield from plan_rows(name, AllocationTrace.of(memory.dry_run(step)))
    yield seconds_row()
    yield from step_rows(device, rounds)
    for name in tqdm(problems, "problems", delay=BAR_DELAY, leave=False):
        yield from problem_rows(name, seconds)
    for name in tqdm(programs, "programs", delay=BAR_DELAY, leave=False):
        yield from capacity_rows(name, trace_of(name))


# --- steps -----------------------------------------------------------------------------------------------------------


def steps():
    """Return {name: function that builds a model and trains it for two steps}, of those that can be imported here."""
    found = {f"our GPT, {n} layers": lambda n=n: gpt(n) for n in (4, 12)}
    if outside.kit() is not None:  # which also makes them importable without torchvision's operators
        found |= {"transformers' Llama": llama, "timm's ConvNeXt": convnext}
    return found


def train(model, loss):
    """Train for two steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def gpt(layers):
    """Train our GPT."""
    model = GPT(GPTConfig(**SHAPE, layers=layers))
    tokens = torch.zeros((4, 256), dtype=torch.int64)
    train(model, lambda: model(tokens, tokens))


def llama():
    """Train a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
                                         num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.zeros((4, 256), dtype=torch.int64)
    train(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def convnext():
    """Train a ConvNeXt of timm."""
    import timm
    model, images = timm.create_model("convnext_tiny", num_classes=10), torch.zeros(8, 3, 96, 96)
    train(model, lambda: model(images).square().mean())


# --- rows ------------------------------------------------------------------------------------------------------------


def plan_rows(name, trace):
    """Yield a row of greedy's arena, of the plan's, and of what PyTorch's allocator reserves."""
    live = trace.peak
    for what, placements in (("greedy", 0), ("plan", PLACEMENTS)):
        plan = plan_static(trace, placements=placements)
        yield row(f"{what}, {name}", "live at the peak", "MB", plan.nbytes / 1e6, live / 1e6, blocks=len(trace.blocks),
                  bound=PLAN_BOUND)
    yield row(f"caching, {name}", "live at the peak", "MB", replay(trace).peak / 1e6, live / 1e6)


def seconds_row():
    """Return a row of seconds of a plan of 7,000 tensors."""
    dice, found, live = random.Random(0), Maker(), []
    for _ in range(TENSORS):
        if len(live) > 60:
            found.free(live.pop(dice.randrange(len(live))))
        live.append(found.alloc(int(2 ** dice.uniform(8, 23))))
    trace, began = found.trace(), time.process_time()
    plan_static(trace)
    return row(f"plan of {TENSORS:,} tensors", "", "s", time.process_time() - began, None, bound=SECONDS_BOUND)


def step_rows(device, rounds):
    """Yield rows of a step in its arena beside the same step: seconds, and bytes outside beside the largest tensor that
    has no out= of its own. RuntimeError if their losses differ."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, layers=4), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(SHAPE["vocab_size"], (4, 256), device=device)

    def step():
        optimizer.zero_grad()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    _, trace = record_step(step)
    plan = plan_static(trace, alignment=trace.alignment)
    arena, listed = Arena(plan.nbytes, trace.device, trace.alignment), without_out(trace)
    found = execute(step, trace=trace, plan=plan, arena=arena)
    if found.departures:
        raise RuntimeError(f"the same step left its plan: {found}")
    outside = found.most_outside
    del found
    yield row("bytes outside of the arena", "the largest that has no out=", "bytes", outside,
              max(nbytes for _, nbytes in listed.values()), arena=plan.nbytes, bound=1.0,
              operations={name: list(each) for name, each in listed.items()})
    timing = compare({"arena": lambda: execute(step, trace=trace, plan=plan, arena=arena), "plain": step},
                     rounds=rounds, title="step")
    yield row("step in its arena", "the same step", "s", timing.median("arena"), timing.median("plain"),
              paired=timing.median("arena") / timing.median("plain"))


def problem_rows(name, seconds):
    """Yield rows of the bytes that greedy and the search need for one of MiniMalloc's problems."""
    lifetimes, capacity = load_problem(name)
    greedy = plan_static(lifetimes, alignment=1, placements=0).nbytes
    yield row(f"MiniMalloc {name}, greedy", "capacity", "bytes", greedy, capacity, blocks=len(lifetimes))
    began = time.process_time()
    plan = solve(lifetimes, capacity, steps=10**9, seconds=seconds)
    yield row(f"MiniMalloc {name}, search", "capacity", "bytes", plan.nbytes if plan else None, capacity,
              seconds=time.process_time() - began, note="" if plan else f"not found in {seconds:.0f} s")


def capacity_rows(name, trace):
    """Yield rows of the least capacity with which a program runs, and of what is moved there."""
    live = trace.peak / 1e6
    for what, make in (("one pool", PlannedPool), ("regions", lambda capacity: RegionPool(trace, capacity)),
                       ("moves", CompactingPool)):
        least = least_capacity(trace, make)
        moved = {}
        if make is CompactingPool:
            pool = CompactingPool(least)
            replay(trace, pool)
            moved = {"moved_bytes": pool.moved}
        yield row(f"capacity, {name}, {what}", "live at the peak", "MB", least / 1e6, live, **moved)
