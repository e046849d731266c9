"""What a rank holds in a step, on the tracker: activations as many as the schedule counts, messages as `route` says.

Mutants that keep all activations, or what they have sent, fail.
"""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from pipeline_kit import WIDTH as C
from pipeline_kit import mlp
from rank_pool import pooled
from torch import nn

from refimpl import memory
from refimpl.comm import ring_traffic
from refimpl.pipeline import PipelineParallelStage, executor, schedule, simulate, validate
from refimpl.pipeline.executor import InstructionRunner
from refimpl.pipeline.instructions import BACKWARD, WEIGHT
from refimpl.pipeline.mailbox import Mailbox
from refimpl.pipeline.messages import message_bytes, message_traffic
from refimpl.pipeline.named_schedules import BUILDERS

ROWS, T = 4, 3  # of a micro-batch, and tokens of a row
N = 8 * ROWS * T  # bytes of one number for each token
X = N * C  # of a stage's input, and of its output
KEPT = N * (2 + C + 4 * C + 4 * C)  # from F until B: 1/σ and mean, what `up` reads, what GELU reads, what `down` reads
LEFT = N * (2 + C + 4 * C + C + 4 * C)  # from B until W: no GELU's, but gradients of what `norm` and `up` return
CASES = [(name, p, m) for name in BUILDERS for p, m in ((1, 2), (2, 4), (4, 8))] + [
    (name, 4, m) for name in ("gpipe", "1f1b", "zb-h1") for m in (1, 3)]
EVERY = pytest.mark.parametrize(("name", "p", "m"), CASES)


def activations(plan):
    """Return (bytes from F until B, bytes from B until W) of each stage."""
    whole, left = [KEPT] * plan.stages, [LEFT] * plan.stages
    for s in range(1, plan.stages):
        if plan.rank_of[s - 1] == plan.rank_of[s]:  # handed over: no message
            whole[s] += X
            left[s] += X
            left[s - 1] += X
    whole[-1] += X  # what the loss reads
    left[-1] += X  # the gradient of what `down` returns, where it is no message
    return whole, left


class Hoarding(InstructionRunner):
    """The mutant that keeps every graph until the step's end."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = []

    def _backward(self, kind, stage, k, arrived, is_last):
        x, ends = self._in_flight.pop((stage, k))
        torch.autograd.backward(ends, arrived, retain_graph=True)
        self.kept.append(ends)
        return [each.grad for each in x if each.requires_grad]


class Late(Mailbox):
    """The mutant that keeps what it sent until the step's end."""

    def receive(self, turn):
        return super().receive(turn._replace(left=()))


MUTANTS = {"hoarding": ("InstructionRunner", Hoarding), "late": ("Mailbox", Late)}


def readings(comm, name, m, mutant=None):
    """Return (activations at most, after each instruction, messages at most, traffic of a step)."""
    plan = schedule(name, comm.world_size, m)
    pipe = PipelineParallelStage({s: mlp() for s in plan.stages_of(comm.rank)}, comm, plan, loss=nn.functional.mse_loss)
    batch = torch.randn(ROWS * m, T, C, dtype=torch.float64)
    for _ in range(2):
        pipe.train_step(batch, batch)
    after, start, run = [], comm.traffic, InstructionRunner.run

    def watched(*args):
        run(*args)
        after.append(t.now["activations"])

    as_mutant = mock.patch.object(executor, *MUTANTS[mutant]) if mutant else contextlib.nullcontext()
    counting = mock.patch.object(InstructionRunner, "run", watched)
    with memory.track(*pipe.stages.values(), batch) as t, as_mutant, counting:
        pipe.train_step(batch, batch)
    line = t.timeline
    most = {c: int(line.nbytes[:, i].max()) for i, c in enumerate(line.categories)}
    return most["activations"], after, most.get("communication", 0), dict(comm.traffic - start)


@functools.cache
def found(name, p, m, mutant=None):
    return pooled(readings, p, name, m, mutant)


def expected(name, p, m):
    """Return [[bytes after each instruction] for each rank], in whole micro-batches of activations."""
    plan = schedule(name, p, m)
    whole, left = activations(plan)
    ranks = []
    for order in plan.ranks:
        now, after = 0, []
        for kind, s, _ in order:
            now += {"F": whole[s], BACKWARD: -whole[s], "B": left[s] - whole[s], WEIGHT: -left[s]}[kind]
            after.append(now)
        ranks.append(after)
    return ranks


@EVERY
def test_activations_after_each_instruction(name, p, m):
    """Between instructions a last rank also has the sum of losses, 8 bytes, which is no activation."""
    assert [after for _, after, _, _ in found(name, p, m)] == expected(name, p, m)


@pytest.mark.parametrize(("name", "p", "m"), [case for case in CASES if case[0] in ("gpipe", "1f1b", "interleaved")])
def test_activations_at_most(name, p, m, mutant=None):
    plan = schedule(name, p, m)
    counts, simulated = validate(plan), simulate(plan, activation_bytes=activations(plan)[0])
    for rank, (most, _, _, _) in enumerate(found(name, p, m, mutant)):
        assert most == simulated.peak_bytes[rank]
        if name == "1f1b":
            assert counts[rank].peak == min(m, p - rank)
            assert most == min(m, p - rank) * (KEPT + X * (rank == p - 1))


@EVERY
def test_messages_at_most(name, p, m, mutant=None):
    for rank, (_, _, most, _) in enumerate(found(name, p, m, mutant)):
        messages = message_bytes(schedule(name, p, m), rank, X, until_weight=True)
        assert most == max(messages, 24 * p)  # or the batch's shapes, before all messages


@EVERY
def test_traffic(name, p, m):
    plan = schedule(name, p, m)
    for rank, (_, _, _, sent) in enumerate(found(name, p, m)):
        others = sum(a != b and rank in (a, b) for a, b in itertools.pairwise(plan.rank_of))
        messages = message_traffic(plan, rank, X)
        assert messages == m * others * X
        check = {"all_gather": ring_traffic("all_gather", 24 * p, p)}
        assert sent == {key: each for key, each in ({"send": messages} | check).items() if each}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_versions_that_free_nothing_fail(mutant):
    fails = {"hoarding": test_activations_at_most, "late": test_messages_at_most}[mutant]
    with pytest.raises(AssertionError):
        fails("1f1b", 4, 8, mutant)
