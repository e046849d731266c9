"""In a 2×2×2 mesh a rank that differs is named by its number in the world, whichever sub-group finds it: who drains
machines by such an error drains the right one."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zero_kit import SGD, gpt, gradients_of_step

from refimpl.comm import CollectiveMismatch, RankError, simulate
from refimpl.comm.agreement import check_same
from refimpl.comm.texts import gather_results
from refimpl.context import SequenceParallelAttention
from refimpl.cross_entropy import chunked_linear_cross_entropy
from refimpl.mesh import Mesh
from refimpl.pipeline import PipelineParallelStage, schedule
from refimpl.tensor import VocabularyParallelEmbedding, tensor_parallel, vocabulary_parallel_cross_entropy
from refimpl.zero import Zero1

BAD = 6  # dp 1, and of tp, pp or cp the lower half: in each sub-group of two it has another number than in the world
TOKENS = torch.arange(32).reshape(2, 16)


def model(comm, group, bad):
    tensor_parallel(nn.Sequential(nn.Linear(4, 8 + 2 * bad), nn.Linear(8 + 2 * bad, 4)), group,
                    {"0": "column", "1": "row"})


def batch(comm, group, bad):
    split = tensor_parallel(gpt(), group)
    split((TOKENS + bad) % 64)


def phase(comm, group, bad):
    engine = Zero1(gpt(), group, SGD)
    gradients_of_step(engine)
    if bad:
        gradients_of_step(engine)
    engine.step()


def text(comm, group, bad):
    check_same(group, "hook", f"a hook, {bad}")


def raises(comm, group, bad):
    gather_results(group, lambda: 1 // (not bad))


def targets(comm, group, bad):
    logits = torch.zeros(3, 4)
    vocabulary_parallel_cross_entropy(logits, torch.tensor([0, 1, 2 + bad]), group, 8)


def targets_of_chunks(comm, group, bad):
    chunked_linear_cross_entropy(torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2 + bad]), comm=group,
                                 vocabulary=8)


def rows_of_a_vocabulary(comm, group, bad):
    VocabularyParallelEmbedding(nn.Parameter(torch.zeros(4 + bad, 2)), group, 8)


def rows_of_a_sequence(comm, group, bad):
    SequenceParallelAttention(group).check_length(torch.zeros(1, 8 + bad))


def stages(comm, group, bad):
    PipelineParallelStage({group.rank + 2 * bad: nn.Linear(2, 2)}, group, schedule("1f1b", 2, 2), loss=F.mse_loss)


def a_schedule(comm, group, bad):
    orders = schedule("gpipe" if bad else "1f1b", 2, 2)
    PipelineParallelStage({group.rank: nn.Linear(2, 2)}, group, orders, loss=F.mse_loss)


def a_batch_of_a_pipeline(comm, group, bad):
    stage = PipelineParallelStage({group.rank: nn.Linear(2, 2)}, group, schedule("1f1b", 2, 2), loss=F.mse_loss)
    stage.train_step(torch.ones(4, 2), torch.ones(4 + bad, 2))


CASES = [(model, "tp", r"ranks \[6\] have another model than rank 7|ranks \[7\] have another model than rank 6"),
         (batch, "tp", r"ranks \[7\] of tensor-parallel group \[6, 7\] have another batch than rank 6"),
         (phase, "dp", r"ranks \[6\] are elsewhere than rank 4: rank 4: step .*; rank 6: backward"),
         (text, "cp", r"ranks \[7\] have another hook than rank 6: rank 6: a hook, True; rank 7: a hook, False"),
         (raises, "tp", "^rank 6 raised ZeroDivisionError"), (targets, "tp", r"^rank [67] \([01] of 2 in its group\)"),
         (targets_of_chunks, "tp", r"^rank [67] \([01] of 2 in its group\)"),
         (rows_of_a_vocabulary, "tp", r"on rank 6 \(0 of 2 in its group\)$"),
         (rows_of_a_sequence, "cp", r"ranks \[7\] .* than rank 6: .* \{6: \(1, 9\), 7: \(1, 8\)\}"),
         (stages, "pp", r"^rank 6 has stages \(3,\)"),
         (a_schedule, "pp", r"^ranks \[6\] have another schedule than rank 2"),
         (a_batch_of_a_pipeline, "pp", r"different numbers of rows, \{2: 4, 6: 5\}")]


@pytest.mark.parametrize(("work", "axis", "told"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_who_differs_is_named_by_its_number_in_the_world(work, axis, told):
    def tried(comm):
        mesh = Mesh(**dict.fromkeys(dict.fromkeys(("dp", axis, "pp", "tp", "cp")), 1) | dict.fromkeys(
            list(dict.fromkeys(("dp", axis, "pp", "tp")))[:3], 2)).connect(comm)
        group = mesh.get_parallel_group(axis)
        try:
            work(comm, group, comm.rank == BAD)
        except (CollectiveMismatch, RankError, ValueError, ZeroDivisionError) as raised:
            return group.ranks, str(raised)
        return group.ranks, ""

    found = simulate(tried, 8)
    assert any(re.search(told, text) for _, text in found), found
    assert not any(text for ranks, text in found if BAD not in ranks)
