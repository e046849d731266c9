"""The engine that all stages begin from: what it makes of a model, when it reduces, and what it refuses."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ADAMW, SGD, Frozen, equal, model_of, parameters_of, rows_of, square
from zero_steps import as_predicted, stack, train

from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import DataParallel, Zero1
from refimpl.zero.data_parallel import AllReduce


def test_parameters_frozen_ones_and_buffers_are_those_of_rank_0():
    def begun(comm):
        """What each rank has after making engines of models of its own."""
        torch.manual_seed(comm.rank)
        model = Frozen()
        model.register_buffer("mean", torch.randn(3))
        other = model.state_dict()
        before = {name: x.clone() for name, x in other.items()}
        DataParallel(model, comm, ADAMW, bucket_bytes=200)
        return before, dict(model.state_dict())

    (first, ours), (second, theirs) = launch(begun, 2)
    assert not equal(first, second)
    assert equal(ours, first) and equal(theirs, first)


class Listening(FakeCommunicator):
    """Notes when a reduction begins."""
    def all_reduce(self, x, op="sum", **options):
        if op == "avg":
            self.seen.append("reduce")
        return super().all_reduce(x, op, **options)


class AllAtTheEnd(DataParallel):
    """The mutant: nothing is reduced while backward runs."""
    class reducer_type(AllReduce):
        def launch_ready(self):
            pass


@pytest.mark.parametrize(("make", "expected"), [
    (DataParallel, ["gradient", "reduce"] * 4), (AllAtTheEnd, ["gradient"] * 4 + ["reduce"] * 4)])
def test_a_bucket_is_reduced_as_soon_as_its_gradients_are_there(make, expected):
    comm = Listening(0, 2)
    comm.seen = []
    model = stack(4, 8)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: comm.seen.append("gradient"))
    engine = make(model, comm, SGD, bucket_bytes=256)
    engine.backward(engine.forward(torch.ones(2, 8)).sum())
    assert comm.seen == expected


def test_gradients_lie_in_buckets_and_nowhere_else():
    assert as_predicted(DataParallel, 0, "gradients")
    engine = DataParallel(model_of("twice"), FakeCommunicator(0, 1), SGD)
    engine.backward(square(engine, torch.ones(2, 10)))
    buffer, = {p.grad.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert buffer == engine.reducer.flat[engine.buckets[0]].data_ptr()


def groups(named):
    return [{"params": [p for name, p in named if name == "scale"], "lr": 0.0},
            {"params": [p for name, p in named if name != "scale"]}]


def test_param_groups_are_the_callers():
    engine = DataParallel(model_of("twice"), FakeCommunicator(0, 1), SGD, groups=groups)
    before = parameters_of(engine)
    after = parameters_of(train(engine, 1))
    assert torch.equal(before["scale"], after["scale"]) and not torch.equal(before["one.bias"], after["one.bias"])
    engine.param_groups[1]["lr"] = 0.0
    assert equal(parameters_of(train(engine, 1)), after)


@on_ranks(1)
def test_what_is_called_in_the_wrong_order(comm):
    engine = Zero1(model_of("twice"), comm, ADAMW)
    for wrong in (engine.step, lambda: engine.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"^step without gradients: call engine.backward\(loss\) first$"):
            wrong()
    with engine.no_sync():
        engine.backward(square(engine, rows_of(comm, 0)))
    with pytest.raises(RuntimeError, match="^the last backward was in no_sync"):
        engine.step()
    engine.zero_grad()
    alone = r"^loss.backward\(\) by itself reduces nothing: call engine.backward\(loss\)$"
    with pytest.raises(RuntimeError, match=alone):
        square(engine, rows_of(comm, 0)).backward()
    assert all(p.grad is None for p in engine.model.parameters())
    train(engine, 1)
    with pytest.raises(TypeError, match="optimizer is an SGD already: expected what makes one"):
        Zero1(model_of("twice"), FakeCommunicator(0, 1), torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(TypeError, match=r"hook='topk': expected an object that reduces buckets, such as Gradient"):
        DataParallel(model_of("twice"), FakeCommunicator(0, 1), hook="topk")
    with pytest.raises(TypeError, match=r"backward\(dict\): expected a loss .*engine.backward\(output.loss\)"):
        DataParallel(model_of("twice"), FakeCommunicator(0, 1)).backward({"loss": torch.zeros(())})
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        Zero1(nn.Tanh(), None)
    with pytest.raises(ValueError, match="norm_type=0.0: expected a number above 0, or inf"):
        DataParallel(model_of("twice"), FakeCommunicator(0, 1)).clip_grad_norm_(1.0, 0)
