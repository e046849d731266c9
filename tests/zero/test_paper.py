"""The idea in one screen beside the engines: the same numbers, the same bytes of each state, the same traffic.

On our GPT and on a model that others wrote, in fp64, in sizes that need no padding. What differs is itemised.
"""

import functools

import pytest
import torch
from one_screen import check_paper
from outside.models import GROUPED, causal
from torch import nn
from torch.nn import functional as F
from zero_kit import ADAMW, BUCKET, ENGINES, equal, farthest, parameters_of

from refimpl import memory
from refimpl.comm import launch
from refimpl.comm.agreement import agreement_traffic
from refimpl.model import GPT, GPTConfig
from refimpl.zero import paper

STEPS, ITEM = 3, 8  # bytes of an element
CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=3, hidden=32, heads=4, tied=False)
STATES = ("parameters", "gradients", "optimizer state")


def gpt():
    """(model, its units, a function of tokens that returns logits)."""
    model = GPT(CONFIG, dtype=torch.float64)
    return model, [model.embedding, model.positions, *model.blocks, model.norm, model.head], model


def llama():
    model = causal("llama", dtype=torch.float64, **GROUPED)()
    units = [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]
    return model, units, lambda tokens: model(input_ids=tokens, use_cache=False).logits


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
        self.model, paper.Unit, original = model, unit, paper.Unit
        try:
            self.zero = paper.Zero(units, comm, ADAMW, stage)
        finally:
            paper.Unit = original
        self.stage, self.optimizer, self.step = stage, self.zero.optimizer, self.zero.step
        self.backward = torch.Tensor.backward
        for each in self.zero.units:
            memory.mark(each.updated, "parameters")
            memory.mark(each.whole, "parameters")

    def parameters(self):
        for unit in self.zero.units if self.stage == 3 else ():
            unit.gather()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def engine_of(model, units, comm, stage):
    options = {"units": units, "look_ahead": 0} if stage == 3 else {}
    engine = ENGINES[stage](model, comm, ADAMW, bucket_bytes=BUCKET, **options)
    engine.parameters_of = functools.partial(parameters_of, engine)
    return engine


def readings(comm, build, stage, make):
    """Three steps of AdamW; of the last one the bytes before the update and at most, and what was sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, units, forward = BUILDS[build]()
    engine = make(model, units, comm, stage)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        rows = torch.randint(0, 64, (4 * comm.world_size, 16), generator=generator).chunk(comm.world_size)[comm.rank]
        before = comm.traffic
        with memory.track(model, engine.optimizer) as t:
            if make is engine_of:  # its forward does more than the model's
                logits = engine(rows) if build == "gpt" else engine(input_ids=rows, use_cache=False).logits
            else:
                logits = forward(rows)
            loss = F.cross_entropy(logits.flatten(0, 1), rows.flatten())
            engine.backward(loss)
            torch.zeros(0)  # an operation: what backward freed last is freed before it
            row = len(t.ops)
            engine.step()
        losses.append(loss.item())
        sent = dict(comm.traffic - before)
    timeline = t.timeline
    most = {name: int(timeline.nbytes[:, timeline.categories.index(name)].max()) for name in STATES}
    parameters = engine.parameters() if isinstance(engine, ByPaper) else engine.parameters_of()
    pieces = [p.numel() for group in engine.optimizer.param_groups for p in group["params"]]
    return {"losses": losses, "parameters": parameters, "now": timeline[row].ledger, "most": most,
            "peak": timeline.totals.max(), "sent": sent, "updated": len(pieces),
            "units": [sum(p.numel() for p in unit.parameters()) for unit in units],
            "gathered once": [sum(p.numel() for p in unit.parameters()) for i, unit in enumerate(units)
                              if i == len(units) - 1 or isinstance(unit, nn.Embedding)],
            "tensors": len(list(model.parameters()))}


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


class Uneven(nn.Module):
    """Sizes that no world divides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def padded(comm):
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        model = Uneven().double()
        zero = paper.Zero(list(model.layers), comm, ADAMW, stage)
        for step in range(3):
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x.chunk(comm.world_size)[comm.rank]).square().mean().backward()
            zero.step()
        for unit in zero.units if stage == 3 else ():
            unit.gather()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_padding_changes_no_number(world_size):
    torch.manual_seed(0)
    model = Uneven().double()
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stages in launch(padded, world_size):
        for stage in stages:
            assert farthest(stage, dict(model.named_parameters())) <= 1e-12


def test_one_screen_that_is_read_first():
    check_paper("zero")
