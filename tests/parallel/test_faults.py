"""A rank that dies, in a split layer's forward or backward: the others end, and name it."""

import os
import signal
import time

import pytest
from patience import patiently, within
from tensor_kit import SPLITS, bodies, loss_of, tokens_of, whole

from refimpl.comm import RankError
from refimpl.comm import launch as launched

pytestmark = pytest.mark.faults


def dies(comm, split, when):
    model = SPLITS[split](whole("gpt"), comm)
    tokens = tokens_of(model)
    loss_of(model, tokens).backward()

    def die(*_):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    block = bodies(model)[1]
    if when == "forward":
        block.mlp.register_forward_pre_hook(die)
    else:
        block.mlp.register_full_backward_hook(die)
    print("begins", time.time(), flush=True)
    loss_of(model, tokens).backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("split", SPLITS)
@patiently
def test_a_rank_that_dies_is_named_within_five_seconds(split, when, capfd):
    with pytest.raises(RankError, match="rank 1 .*SIGKILL"):
        launched(dies, 4, split, when)
    ended = time.time()
    begun = max(float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if "begins" in line)
    within(ended - begun, 5)
