"""What an engine is given to train: what is refused by name, before anything changes."""

import pytest
import torch
from torch import nn
from zero_kit import ENGINES, SGD, Elsewhere, Frozen, square

from refimpl.comm import FakeCommunicator, simulate
from refimpl.mesh import Mesh
from refimpl.zero import DataParallel
from refimpl.zero.internals.argument_checks import trained_and_frozen


class Complex(nn.Module):
    def __init__(self, trained_and_frozen=True):
        super().__init__()
        self.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64), trained_and_frozen)
        self.layer = nn.Linear(3, 3)


def test_complex_parameters_that_are_frozen_stay_whole():
    for make in ENGINES:
        engine = make(Complex(trained_and_frozen=False), FakeCommunicator(0, 1), SGD)
        with engine.gathered():
            assert engine.model.phases.is_complex() and engine.model.phases.real.sum() == 3


def test_what_is_trained_and_what_is_frozen():
    ours, frozen = trained_and_frozen(Frozen(), SGD)
    assert [name for name, _ in ours] == ["0.weight", "0.bias", "4.weight"]
    assert [name for name, _ in frozen] == ["2.weight", "2.bias", "4.bias"]


@pytest.mark.parametrize(("model", "options", "error", "said"), [
    (Frozen, {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, TypeError, "optimizer is an SGD already"),
    (Frozen, {"store": Elsewhere()}, TypeError, "store=.*: DataParallel has no shards to store; use Zero1, Zero2 or Z"),
    (Complex, {}, TypeError, r"phases is complex, .* keep it as a real parameter, torch.view_as_real\(x\)"),
    (nn.Tanh, {}, ValueError, "no parameter of the model requires a gradient"),
    (lambda: nn.Linear(2, 2, device="meta"), {}, ValueError,
     "weight is on the meta device: Zero3 gives such a model its values")])
def test_what_is_refused(model, options, error, said):
    for make in ENGINES if not options and error is TypeError else [DataParallel]:
        with pytest.raises(error, match=said):
            make(model(), FakeCommunicator(0, 1), **options)


@pytest.mark.parametrize("make", ENGINES)
def test_a_parameter_that_is_thawed_later_is_named(make):
    engine = make(Frozen(), FakeCommunicator(0, 2), SGD)
    engine.model[2].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="2.weight requires a gradient now, and did not when the engine was made"):
        engine.backward(square(engine, torch.ones(2, 10)))


def test_elements_on_two_ranks_that_are_no_replicas_are_named_whatever_the_data_parallelism():
    """One rank of each group for data parallelism tells what all of it holds."""
    def made(comm, dp):
        group = Mesh(dp=dp, tp=2).connect(comm).get_parallel_group("dp")
        with pytest.raises(ValueError, match="weight: elements 0 … 3 are on rank 0 and on rank 1: ranks that hold the"):
            DataParallel(nn.Linear(2, 2), group, SGD, world=comm)
        return True

    for dp in (1, 2):
        assert all(simulate(made, 2 * dp, dp))
