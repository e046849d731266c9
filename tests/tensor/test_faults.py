"""A rank that dies, in a split layer's forward or backward: the others end, and name it."""

import pytest
from patience import patiently
from rank_pool import begins, killed_and_named, killing
from tensor_kit import SPLITS, bodies, loss_of, tokens_of, whole

pytestmark = pytest.mark.faults


def dies(comm, split, when):
    model = SPLITS[split](whole("gpt"), comm)
    tokens, mlp = tokens_of(model), bodies(model)[1].mlp
    loss_of(model, tokens).backward()
    (mlp.register_forward_pre_hook if when == "forward" else mlp.register_full_backward_hook)(killing(comm))
    begins()
    loss_of(model, tokens).backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("split", SPLITS)
@patiently
def test_a_rank_that_dies_is_named_within_five_seconds(split, when, capfd):
    killed_and_named(capfd, dies, split, when)
