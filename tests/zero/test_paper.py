"""The idea in one screen beside the engines: the same numbers, the same bytes of each state, the same traffic.

On our GPT and on a model that others wrote, in fp64, in sizes that need no padding. What differs is itemised.
"""

import functools
import unittest.mock

import pytest
import torch
from one_screen import check_paper
from outside.models import GROUPED, causal
from rank_pool import on_ranks
from torch import nn
from torch.nn import functional as F
from zero_kit import ADAMW, BUCKET, ENGINES, Layers, batch, copied, equal, farthest, own_rows, parameters_of, square
from zero_steps import STATES, most, plainly

from refimpl import memory
from refimpl.comm import launch
from refimpl.comm.agreement import agreement_traffic
from refimpl.model import GPT, GPTConfig
from refimpl.papers import zero as paper

STEPS, ITEM = 3, 8  # bytes of an element
CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=3, hidden=32, heads=4, tied=False)


def gpt():
    """(model, its units, a function of what is called and tokens that returns logits)."""
    model = GPT(CONFIG, dtype=torch.float64)
    units = [model.embedding, model.positions, *model.blocks, model.norm, model.head]
    return model, units, lambda call, tokens: call(tokens)


def llama():
    model = causal("llama", dtype=torch.float64, **GROUPED)()
    units = [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]
    return model, units, lambda call, tokens: call(input_ids=tokens, use_cache=False).logits


BUILDS = {"gpt": gpt, "llama": llama}


class Whole(paper.Unit):
    """The mutant of stage 1: every rank updates, and has the state of, all elements."""

    def __init__(self, module, comm, stage):
        super().__init__(module, comm, 0)

    def gather(self):
        """No-op: this rank has updated all of them."""


class Hoarding(paper.Unit):
    """The mutant of stage 2: whole gradients stay."""
    def reduce(self):
        self.hoard = [p.grad for p in self.parameters]
        super().reduce()


class Unreleased(paper.Unit):
    """The mutant of stage 3: parameters stay whole."""
    def release(self):
        pass


MUTANTS = {1: Whole, 2: Hoarding, 3: Unreleased}


class ByPaper:
    """The paper's classes with the face of an engine. `memory.mark`: to a tracker, a tensor that only an optimizer has
    is a master copy; what stage 3 updates is the parameters themselves."""

    def __init__(self, model, units, comm, stage, unit=paper.Unit):
        with unittest.mock.patch.object(paper, "Unit", unit):
            self.zero = paper.Zero(units, comm, ADAMW, stage)
        self.model, self.optimizer, self.step = model, self.zero.optimizer, self.zero.step
        self.backward = torch.Tensor.backward
        for each in self.zero.units:
            memory.mark(each.updated, "parameters")
            memory.mark(each.whole, "parameters")

    def parameters(self):
        return gathered(self.zero, self.model)


def gathered(zero, model):
    """The whole parameters, of which the paper's classes have shards at stage 3."""
    for unit in zero.units if zero.stage == 3 else ():
        unit.gather()
    return copied(model)


def engine_of(model, units, comm, stage):
    options = {"units": units, "look_ahead": 0} if stage == 3 else {}
    return ENGINES[stage](model, comm, ADAMW, bucket_bytes=BUCKET, **options)


def readings(comm, build, stage, make):
    """Three steps of AdamW; of the last one the bytes before the update and at most, and what was sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, units, forward = BUILDS[build]()
    engine = make(model, units, comm, stage)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        rows = own_rows(comm, torch.randint(0, 64, (4 * comm.world_size, 16), generator=generator))
        before = comm.traffic
        with memory.track(model, engine.optimizer) as t:
            logits = forward(engine if make is engine_of else model, rows)  # an engine's does more than the model's
            loss = F.cross_entropy(logits.flatten(0, 1), rows.flatten())
            engine.backward(loss)
            torch.zeros(0)  # an operation: what backward freed last is freed before it
            row = len(t.ops)
            engine.step()
        losses.append(loss.item())
        sent = dict(comm.traffic - before)
    numels = [sum(p.numel() for p in unit.parameters()) for unit in units]
    return {"losses": losses, "now": t.timeline[row].ledger, "most": {name: int(most(t, name)) for name in STATES},
            "parameters": engine.parameters() if isinstance(engine, ByPaper) else parameters_of(engine),
            "sent": sent, "updated": sum(len(group["params"]) for group in engine.optimizer.param_groups),
            "units": numels, "tensors": len(list(model.parameters())),
            "gathered once": [numel for numel, unit in zip(numels, units, strict=True)
                              if unit is units[-1] or isinstance(unit, nn.Embedding)]}


def both(comm, build, stage):
    return readings(comm, build, stage, engine_of), readings(comm, build, stage, ByPaper)


def mutant(comm, build, stage):
    return readings(comm, build, stage, functools.partial(ByPaper, unit=MUTANTS[stage]))


@functools.cache
def found(build, stage, world_size):
    return launch(both, world_size, build, stage)


CASES = pytest.mark.parametrize(("build", "stage", "world_size"),
                                [(build, stage, N) for build in BUILDS for stage in range(4) for N in (2, 4)])


@CASES
def test_the_same_numbers(build, stage, world_size):
    for engines, papers in found(build, stage, world_size):
        assert papers["losses"][0] != papers["losses"][-1]
        if stage or world_size == 2:
            assert papers["losses"] == engines["losses"] and equal(papers["parameters"], engines["parameters"])
        else:  # gloo's all_reduce adds four numbers in an order that depends on their place in the tensor
            assert papers["losses"] == pytest.approx(engines["losses"], rel=1e-12, abs=0)
            assert farthest(papers["parameters"], engines["parameters"]) <= 1e-12


@CASES
def test_the_same_bytes(build, stage, world_size):
    for engines, papers in found(build, stage, world_size):
        assert_same_bytes(stage, world_size, engines, papers)


def assert_same_bytes(stage, N, engines, papers):
    psi, largest = ITEM * sum(papers["units"]), ITEM * max(papers["units"])
    ours, theirs = papers["now"], engines["now"]
    nan = ITEM * (stage == 3)  # the engine's released parameters read as NaN: one element
    assert ours["parameters"] == theirs["parameters"] - nan == psi // (N if stage == 3 else 1)
    assert ours["gradients"] == theirs["gradients"] == psi // (N if stage >= 2 else 1)
    counters = 4 * (engines["updated"] - papers["updated"])  # Adam's: one for each tensor that an optimizer is given
    assert ours["optimizer state"] == theirs["optimizer state"] - counters
    assert ours["optimizer state"] == 2 * psi // (N if stage else 1) + 4 * papers["updated"]
    # over the whole step: one unit at most is whole
    assert papers["most"]["parameters"] == engines["most"]["parameters"] - nan == ours["parameters"] + (
        largest if stage == 3 else 0)
    if stage < 2:
        assert papers["most"]["gradients"] == engines["most"]["gradients"] == psi
    else:  # the engine cuts buckets of other sizes, and fills one while two are on the wire
        assert papers["most"]["gradients"] <= psi // N + largest


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("stage", MUTANTS)
def test_a_version_that_saves_nothing_has_the_same_numbers_and_fails_here(build, stage):
    for (engines, papers), wasteful in zip(found(build, stage, 2), launch(mutant, 2, build, stage), strict=True):
        assert wasteful["losses"] == papers["losses"] and equal(wasteful["parameters"], papers["parameters"])
        with pytest.raises(AssertionError):
            assert_same_bytes(stage, 2, engines, wasteful)


@CASES
def test_the_same_traffic(build, stage, world_size):
    N = world_size
    for rank, (engines, papers) in enumerate(found(build, stage, N)):
        sent = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0) | engines["sent"]
        for name, checks in agreement_traffic(N, rank, engines["tensors"], 3 if stage == 3 else 2).items():
            sent[name] -= checks
        # The engine gathers twice only what its backward reads again, and what forward has not just left whole.
        sent["all_gather"] += (stage == 3) * ITEM * sum(engines["gathered once"]) * (N - 1) // N
        assert {name: count for name, count in sent.items() if count} == papers["sent"]
        assert sum(papers["sent"].values()) == (3 if stage == 3 else 2) * ITEM * sum(papers["units"]) * (N - 1) // N


def uneven():
    """(a model in sizes that no world divides, batches)."""
    torch.manual_seed(0)
    return Layers(3, 5).double(), [batch(step, 5, 8).double() for step in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks("world_size")
def test_padding_changes_no_number(comm, world_size):
    model, batches = uneven()
    expected = plainly(model, ADAMW, (square(model, x) for x in batches))
    for stage in range(4):
        model, batches = uneven()
        zero = paper.Zero(list(model), comm, ADAMW, stage)
        for x in batches:
            square(model, own_rows(comm, x)).backward()
            zero.step()
        assert farthest(gathered(zero, model), expected) <= 1e-12


def test_one_screen_that_is_read_first():
    check_paper("zero", "zero")
