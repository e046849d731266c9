"""Bad input to a pipeline, each with its error; and a rank that dies."""

import os
import signal
import time
from fractions import Fraction

import pytest
import torch
from patience import patiently, within
from torch import nn

from refimpl.comm import RankError, launch
from refimpl.comm import launch as launched
from refimpl.parallel import PipelineParallelStage, pipeline
from refimpl.parallel.pipeline import Instruction, Schedule, schedule

WIDTH = 8


def layers(n):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))


def made(comm, plan, modules=None, **how):
    modules = modules or {s: nn.Linear(WIDTH, WIDTH) for s in plan.stages_of(comm.rank)}
    return PipelineParallelStage(modules, comm, plan, loss=how.pop("loss", nn.functional.mse_loss), **how)


def swapped(comm):
    first, *others = schedule("1f1b", 2, 4).ranks
    made(comm, Schedule("swapped", ((first[2], *first[:2], *first[3:]), *others), (0, 1), 4))


def circle(comm):
    first, second = ([Instruction(kind, s, k) for k in order for kind in ("F", "FULL")]
                     for s, order in enumerate(((0, 1), (1, 0))))
    made(comm, Schedule("circle", (tuple(first), tuple(second)), (0, 1), 2))


def more_stages(comm):
    pipeline(layers(1), comm, "1f1b", 2, loss=nn.functional.mse_loss)


def other_dtypes(comm):
    plan = schedule("1f1b", 2, 2)
    made(comm, plan, {comm.rank: nn.Linear(WIDTH, WIDTH).to(torch.float64 if comm.rank else torch.float32)})


def no_micro_batches(comm):
    pipeline(layers(2), comm, "1f1b", 0)


def none_given(comm):
    pipeline(layers(2), comm, "1f1b")


def other_schedules(comm):
    made(comm, schedule("1f1b", 2, 2 + comm.rank))


def too_few_ranks(comm):
    made(comm, schedule("1f1b", 3, 2), {comm.rank: nn.Linear(WIDTH, WIDTH)})


def other_stages(comm):
    made(comm, schedule("1f1b", 2, 2), {0: nn.Linear(WIDTH, WIDTH)})


def few_rows(comm):
    made(comm, schedule("1f1b", 2, 4)).train_step(torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))


def other_rows(comm):
    made(comm, schedule("1f1b", 2, 2)).train_step(torch.zeros(4 + comm.rank, WIDTH), torch.zeros(4 + comm.rank, WIDTH))


def no_inputs(comm):
    made(comm, schedule("1f1b", 2, 2)).train_step(None, torch.zeros(4, WIDTH))


def no_targets(comm):
    made(comm, schedule("1f1b", 2, 2)).train_step(torch.zeros(4, WIDTH))


def text(comm):
    made(comm, schedule("1f1b", 2, 2)).train_step(["a"], torch.zeros(4, WIDTH))


def no_loss(comm):
    plan = schedule("1f1b", 2, 2)
    module = nn.Bilinear(WIDTH, WIDTH, 1) if comm.rank else nn.Linear(WIDTH, WIDTH)
    made(comm, plan, {comm.rank: module}, loss=None).train_step(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))


def nothing_counts(comm):
    made(comm, schedule("1f1b", 2, 2), count=lambda targets: 0).train_step(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))


def two_copies(comm):
    plan = schedule("zb-v", 2, 4)
    tie = [{0: "weight", 3: "weight"}]
    made(comm, plan, tied=tie)


CASES = {swapped: "FULL of stage 0, micro-batch 0 in place 0, and it waits for F", circle: "deadlocks: rank . is at",
         more_stages: "stages=2 of a model of 1 layers",
         other_dtypes: "stage 1 has parameters of torch.float64, stage 0 of torch.float32",
         no_micro_batches: "micro_batches=0: expected an integer of at least 1", none_given: "micro_batches=None",
         other_schedules: "another schedule than rank 0", too_few_ranks: "is for 3 ranks, and there are 2",
         other_stages: r"rank 1 has stages \(0,\)", few_rows: "3 rows for 4 micro-batches",
         other_rows: "different numbers of rows, {0: 4, 1: 5}", no_inputs: "rank 0 has no inputs",
         no_targets: "rank 1 has no targets", text: "the batch holds str", no_loss: r"loss has shape \(2, 1\)",
         nothing_counts: r"micro-batches have \[0, 0\] targets", two_copies: "weight and weight are tied"}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_bad_input_is_named(body):
    with pytest.raises(RankError, match=CASES[body]):
        launch(body, 2)


def test_a_fraction_is_no_number_of_stages():
    with pytest.raises(ValueError, match="micro_batches=Fraction"):
        schedule("1f1b", 2, Fraction(3))


# --- a rank that dies ------------------------------------------------------------------------------------------------


def dies(comm, name, when):
    """Rank 1 ends itself in the second step: the others wait in recv, or in send."""
    torch.set_num_threads(1)
    plan = schedule(name, comm.world_size, 8)
    pipe = made(comm, plan)
    batch = torch.randn(8, 4096, WIDTH)  # a message that does not fit into a socket's buffer
    pipe.train_step(batch, batch)

    def die(*_):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    unit = pipe.stages[plan.stages_of(comm.rank)[0]]
    unit.register_forward_pre_hook(die) if when == "forward" else unit.register_full_backward_hook(die)
    print("begins", time.time(), flush=True)
    pipe.train_step(batch, batch)


@pytest.mark.faults
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
@patiently
def test_a_rank_that_dies_is_named_within_five_seconds(name, when, capfd):
    with pytest.raises(RankError, match="rank 1 .*SIGKILL"):
        launched(dies, 4, name, when)
    ended = time.time()
    begun = max(float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if "begins" in line)
    within(ended - begun, 5)


def hidden(comm):
    """All ranks but one are waited for: the first one has not come."""
    pipe = made(comm, schedule("1f1b", comm.world_size, 4))
    if comm.rank == 0:
        raise OSError("the data are not there")
    pipe.train_step(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))


@pytest.mark.faults
def test_a_rank_that_raises_is_named():
    with pytest.raises(RankError, match="rank 0 .*the data are not there"):
        launched(hidden, 4)
