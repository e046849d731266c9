"""1F1B in one screen beside the executor: the same gradients, activations in flight and messages sent."""

import copy
import functools

import pytest
import torch
from one_screen import check_paper
from pipeline_kit import WIDTH as C
from pipeline_kit import mlp
from rank_pool import pooled
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.papers import pipeline as paper
from refimpl.pipeline import PipelineParallelStage, partition, schedule
from refimpl.pipeline.messages import message_traffic

ROWS, T = 3, 4
X = 8 * ROWS * T * C


def gpt_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def given(kind, p, m):
    """Return (stages, inputs, targets, loss), the same on all ranks."""
    torch.manual_seed(0)
    if kind == "mlp":
        x, y = torch.randn(2, m * ROWS, T, C, dtype=torch.float64)
        return [mlp() for _ in range(p)], x, y, F.mse_loss
    model = GPT(GPTConfig(vocab_size=31, context_length=T, layers=p, hidden=C, heads=2, tied=False)).double()
    x, y = torch.randint(31, (2, m * ROWS, T))
    return partition(model, p, "uniform"), x, y, gpt_loss


def by_paper(comm, stage, inputs, targets, loss, m):
    like = torch.empty(ROWS, T, C, dtype=torch.float64)
    return lambda: paper.one_forward_one_backward(stage, comm, inputs.chunk(m), targets.chunk(m), loss, like)


def by_executor(comm, stage, inputs, targets, loss, m, name="1f1b"):
    pipe = PipelineParallelStage({comm.rank: stage}, comm, schedule(name, comm.world_size, m), loss=loss)
    return lambda: pipe.train_step(inputs, targets)


# "all first": the mutant that runs all forwards first, and keeps them.
VERSIONS = {"paper": by_paper, "executor": by_executor, "all first": functools.partial(by_executor, name="gpipe")}


def readings(comm, version, kind, m):
    """Return (loss, gradients, most bytes of activations, bytes of messages sent)."""
    stages, inputs, targets, loss = given(kind, comm.world_size, m)
    stage = stages[comm.rank]
    step = VERSIONS[version](comm, stage, inputs, targets, loss, m)
    step()
    step()  # gradients add up
    gradients = [p.grad.clone() for p in stage.parameters()]
    start = comm.traffic["send"]
    with memory.track(stage, inputs, targets) as t:
        total = step()
    sent = comm.traffic["send"] - start
    column = t.timeline.nbytes[:, t.timeline.categories.index("activations")]
    return float(total or 0), gradients, int(column.max()), sent


@functools.cache
def found(version, kind, p, m):
    return pooled(readings, p, version, kind, m)


CASES = pytest.mark.parametrize(("kind", "p", "m"), [("mlp", 1, 3), ("mlp", 2, 4), ("mlp", 4, 2), ("mlp", 4, 6),
                                                     ("gpt", 2, 4), ("gpt", 4, 6)])


@CASES
def test_the_numbers_of_the_executor(kind, p, m):
    for ours, theirs in zip(found("paper", kind, p, m), found("executor", kind, p, m), strict=True):
        assert ours[0] == theirs[0] and all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@CASES
def test_the_numbers_of_the_whole_model(kind, p, m):
    stages, inputs, targets, loss = given(kind, p, m)
    whole = copy.deepcopy(nn.Sequential(*stages))
    value = loss(whole(inputs), targets)
    value.backward()
    ranks = found("paper", kind, p, m)
    assert ranks[-1][0] == pytest.approx(value.item(), abs=1e-12)
    for r, (_, gradients, _, _) in enumerate(ranks):
        for mine, p_whole in zip(gradients, whole[r].parameters(), strict=True):
            assert (mine / 2 - p_whole.grad).abs().max() <= 1e-12 * max(1, p_whole.grad.abs().max())


@CASES
def test_activations_and_traffic_of_the_executor(kind, p, m, version="paper"):
    plan = schedule("1f1b", p, m)
    for r, (ours, theirs) in enumerate(zip(found(version, kind, p, m), found("executor", kind, p, m), strict=True)):
        assert ours[2:] == theirs[2:] and ours[3] == message_traffic(plan, r, X)
        if kind == "mlp":
            assert ours[2] == min(m, p - r) * (8 * ROWS * T * (2 + 9 * C) + X * (r == p - 1))


def test_all_forwards_first_has_the_same_numbers_and_fails_here():
    for ours, theirs in zip(found("all first", "mlp", 4, 6), found("executor", "mlp", 4, 6), strict=True):
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(ours[1], theirs[1], strict=True))
    with pytest.raises(AssertionError):
        test_activations_and_traffic_of_the_executor("mlp", 4, 6, "all first")


def test_one_screen_that_is_read_first():
    check_paper("pipeline", "pipeline")
