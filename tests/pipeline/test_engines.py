"""Stages trained by engines: data parallelism and ZeRO inside a pipeline, two by two ranks."""

from functools import partial

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from refimpl.comm import FakeCommunicator
from refimpl.pipeline import PipelineParallelStage, schedule
from refimpl.zero import DataParallel, Zero1, Zero2

C, ROWS, M = 16, 6, 3
ENGINES = {"data parallel": DataParallel, "zero 1": Zero1, "zero 2": Zero2}


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)).double() for _ in range(2)]


def rows_of(rank):
    return torch.randn(2, ROWS, C, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("name", ENGINES)
@on_ranks(4)
def test_the_weights_of_one_process(comm, name):
    """Two steps of each pair of ranks on its own rows."""
    place, replica = comm.rank % 2, comm.rank // 2
    column = comm.split([0, 1] if replica == 0 else [2, 3])
    row = comm.split([0, 2] if place == 0 else [1, 3])
    stage, whole = layers()[place], nn.Sequential(*layers())
    engine = ENGINES[name](stage, row, partial(torch.optim.SGD, lr=0.5))
    pipe = PipelineParallelStage({place: engine}, column, schedule("1f1b", 2, M), loss=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    x, y = torch.cat([rows_of(0), rows_of(1)], 1)
    for _ in range(2):
        mine = pipe.train_step(*rows_of(replica))
        engine.step()
        nn.functional.mse_loss(whole(x), y).backward()
        optimizer.step(), optimizer.zero_grad()
    assert (mine is not None) == (place == 1)
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(stage.parameters(), whole[place].parameters(), strict=True))


def test_an_engine_of_one_stage_has_the_gradients_of_the_whole_batch():
    """On a rank alone."""
    for make in ENGINES.values():
        comm, (stage, whole) = FakeCommunicator(0, 1), (layers()[0] for _ in "12")
        engine = make(stage, comm, partial(torch.optim.SGD, lr=0.5))
        pipe = PipelineParallelStage({0: engine}, comm, schedule("1f1b", 1, M), loss=nn.functional.mse_loss)
        x, y = rows_of(0)
        pipe.train_step(x, y)
        engine.step()
        nn.functional.mse_loss(whole(x), y).backward()
        torch.optim.SGD(whole.parameters(), lr=0.5).step()
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(stage.parameters(), whole.parameters(), strict=True))


@on_ranks(2, fails="is trained by DataParallel, and schedule zb-h1 divides its backward")
def test_a_divided_backward_of_an_engine_is_refused(comm):
    engine = DataParallel(layers()[comm.rank], comm.split([comm.rank]), partial(torch.optim.SGD, lr=0.5))
    PipelineParallelStage({comm.rank: engine}, comm, schedule("zb-h1", 2, 4))
