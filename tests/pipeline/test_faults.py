"""Bad input to a pipeline, each with its error; and a rank that dies."""

from fractions import Fraction

import pytest
import torch
from patience import patiently
from rank_pool import begins, failure, killed_and_named, killing, on_ranks, pooled
from torch import nn

from refimpl.comm import launch
from refimpl.pipeline import Instruction, PipelineParallelStage, Schedule, pipeline, schedule

WIDTH = 8


def layers(n):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))


def made(comm, plan, modules=None, loss=nn.functional.mse_loss, **how):
    modules = modules or {s: nn.Linear(WIDTH, WIDTH) for s in plan.stages_of(comm.rank)}
    return PipelineParallelStage(modules, comm, plan, loss=loss, **how)


def swapped(comm):
    first, *others = schedule("1f1b", 2, 4).ranks
    made(comm, Schedule("swapped", ((first[2], *first[:2], *first[3:]), *others), (0, 1), 4))


def circle(comm):
    first, second = ([Instruction(kind, s, k) for k in order for kind in ("F", "FULL")]
                     for s, order in enumerate(((0, 1), (1, 0))))
    made(comm, Schedule("circle", (tuple(first), tuple(second)), (0, 1), 2))


def trained(comm, *batch, micro_batches=2, **how):
    made(comm, schedule("1f1b", 2, micro_batches), **how).train_step(*batch)


ROWS = torch.zeros(4, WIDTH)
CASES = {
    "FULL of stage 0, micro-batch 0 in place 0, and it waits for F": swapped, "deadlocks: rank . is at": circle,
    "stages=2 of a model of 1 layers": lambda comm: pipeline(layers(1), comm, "1f1b", 2),
    "stage 1 has parameters of torch.float64, stage 0 of torch.float32": lambda comm: made(
        comm, schedule("1f1b", 2, 2), {comm.rank: layers(1).to(torch.float64 if comm.rank else torch.float32)}),
    "micro_batches=0: expected an integer of at least 1": lambda comm: pipeline(layers(2), comm, "1f1b", 0),
    "micro_batches=None": lambda comm: pipeline(layers(2), comm, "1f1b"),
    "another schedule than rank 0": lambda comm: made(comm, schedule("1f1b", 2, 2 + comm.rank)),
    "is for 3 ranks, and there are 2": lambda comm: made(comm, schedule("1f1b", 3, 2), {comm.rank: layers(1)}),
    r"rank 1 has stages \(0,\)": lambda comm: made(comm, schedule("1f1b", 2, 2), {0: layers(1)}),
    "3 rows for 4 micro-batches": lambda comm: trained(comm, ROWS[:3], ROWS[:3], micro_batches=4),
    "different numbers of rows, {0: 4, 1: 5}": lambda comm: trained(comm, *torch.zeros(2, 4 + comm.rank, WIDTH)),
    "rank 0 has no inputs": lambda comm: trained(comm, None, ROWS),
    "rank 1 has no targets": lambda comm: trained(comm, ROWS),
    "the batch holds str": lambda comm: trained(comm, ["a"], ROWS),
    r"loss has shape \(2, 1\)": lambda comm: trained(comm, ROWS, ROWS, loss=None, modules={
        comm.rank: nn.Bilinear(WIDTH, WIDTH, 1) if comm.rank else layers(1)}),
    r"micro-batches have \[0, 0\] targets": lambda comm: trained(comm, ROWS, ROWS, count=lambda targets: 0),
    "weight and weight are tied": lambda comm: made(comm, schedule("zb-v", 2, 4), tied=[{0: "weight", 3: "weight"}])}


@pytest.mark.parametrize("words", CASES)
def test_bad_input_is_named(words):
    failure(words, CASES[words], 2, launch=pooled)


def test_a_fraction_is_no_number_of_stages():
    with pytest.raises(ValueError, match="micro_batches=Fraction"):
        schedule("1f1b", 2, Fraction(3))


def dies(comm, name, when):
    """Rank 1 ends itself in the second step: the others wait in recv, or in send."""
    torch.set_num_threads(1)
    pipe = made(comm, schedule(name, comm.world_size, 8))
    batch = torch.randn(8, 4096, WIDTH)  # a message that does not fit into a socket's buffer
    pipe.train_step(batch, batch)
    unit = pipe.stages[pipe.schedule.stages_of(comm.rank)[0]]
    (unit.register_forward_pre_hook if when == "forward" else unit.register_full_backward_hook)(killing(comm))
    begins()
    pipe.train_step(batch, batch)


@pytest.mark.faults
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
@patiently
def test_a_rank_that_dies_is_named_within_five_seconds(name, when, capfd):
    killed_and_named(capfd, dies, name, when)


@pytest.mark.faults
@on_ranks(4, fails="rank 0 .*the data are not there", launch=launch)
def test_a_rank_that_raises_is_named(comm):
    """All ranks but one are waited for: the first one has not come."""
    pipe = made(comm, schedule("1f1b", comm.world_size, 4))
    if comm.rank == 0:
        raise OSError("the data are not there")
    pipe.train_step(ROWS, ROWS)
