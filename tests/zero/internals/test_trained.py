"""What an engine is given to train: what is refused by name, before anything changes."""

import pytest
import torch
from torch import nn
from zero_kit import ENGINES, SGD, Elsewhere, Frozen, square

from refimpl.comm import FakeCommunicator
from refimpl.zero import DataParallel
from refimpl.zero.internals.trained import trained


def test_what_is_trained_and_what_is_frozen():
    ours, frozen = trained(Frozen(), SGD)
    assert [name for name, _ in ours] == ["0.weight", "0.bias", "4.weight"]
    assert [name for name, _ in frozen] == ["2.weight", "2.bias", "4.bias"]


@pytest.mark.parametrize(("model", "options", "error", "said"), [
    (Frozen, {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, TypeError, "optimizer is an SGD already"),
    (Frozen, {"store": Elsewhere()}, TypeError, "store=.*: DataParallel has no shards to store; use Zero1, Zero2 or Z"),
    (nn.Tanh, {}, ValueError, "no parameter of the model requires a gradient"),
    (lambda: nn.Linear(2, 2, device="meta"), {}, ValueError,
     "weight is on the meta device: Zero3 gives such a model its values")])
def test_what_is_refused(model, options, error, said):
    with pytest.raises(error, match=said):
        DataParallel(model(), FakeCommunicator(0, 1), **options)


@pytest.mark.parametrize("make", ENGINES)
def test_a_parameter_that_is_thawed_later_is_named(make):
    engine = make(Frozen(), FakeCommunicator(0, 2), SGD)
    engine.model[2].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="2.weight requires a gradient now, and did not when the engine was made"):
        engine.backward(square(engine, torch.ones(2, 10)))
