"""The engine that all stages begin from: what it makes of a model, when it reduces, and what it refuses."""

import pytest
import torch
from torch import nn
from zero_kit import ADAMW, BUCKET, SGD, Frozen, equal, gpt, model_of, parameters_of, rows_of, square, states_of

from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import DataParallel, Zero1
from refimpl.zero.closed_forms import model_state_bytes
from refimpl.zero.data_parallel import AllReduce


def begun(comm):
    """What each rank has after making engines of models of its own."""
    torch.manual_seed(comm.rank)
    model = Frozen()
    model.register_buffer("mean", torch.randn(3))
    other = model.state_dict()
    before = {name: x.clone() for name, x in other.items()}
    DataParallel(model, comm, ADAMW, bucket_bytes=200)
    return before, dict(model.state_dict())


def test_parameters_frozen_ones_and_buffers_are_those_of_rank_0():
    (first, ours), (second, theirs) = launch(begun, 2)
    assert not equal(first, second)
    assert equal(ours, first) and equal(theirs, first)


class Listening(FakeCommunicator):
    """Notes when a reduction begins."""

    def all_reduce(self, x, op="sum", **options):
        if op == "avg":
            self.seen.append("reduce")
        return super().all_reduce(x, op, **options)


class Late(AllReduce):
    def launch_ready(self):
        pass


class AllAtTheEnd(DataParallel):
    """The mutant: nothing is reduced while backward runs."""

    reducer_type = Late


@pytest.mark.parametrize(("make", "expected"), [
    (DataParallel, ["gradient", "reduce"] * 4), (AllAtTheEnd, ["gradient"] * 4 + ["reduce"] * 4)])
def test_a_bucket_is_reduced_as_soon_as_its_gradients_are_there(make, expected):
    comm = Listening(0, 2)
    comm.seen = []
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: comm.seen.append("gradient"))
    engine = make(model, comm, SGD, bucket_bytes=256)
    engine.backward(engine.forward(torch.ones(2, 8)).sum())
    assert comm.seen == expected


def test_gradients_lie_in_buckets_and_nowhere_else():
    now, expected = states_of(DataParallel), model_state_bytes(gpt(), 4, 0, bucket_bytes=BUCKET)
    assert now["gradients"] == expected["gradients"]
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
    engine.backward(square(engine, rows_of(engine.comm, 0)))
    engine.step()
    after = parameters_of(engine)
    assert torch.equal(before["scale"], after["scale"]) and not torch.equal(before["one.bias"], after["one.bias"])
    engine.param_groups[1]["lr"] = 0.0
    engine.backward(square(engine, rows_of(engine.comm, 0)))
    engine.step()
    assert equal(parameters_of(engine), after)


def misused(comm):
    said = []
    engine = Zero1(model_of("twice"), comm, ADAMW)
    for wrong in (engine.step, lambda: engine.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError) as error:
            wrong()
        said.append(str(error.value))
    with engine.no_sync():
        engine.backward(square(engine, rows_of(comm, 0)))
    with pytest.raises(RuntimeError) as error:
        engine.step()
    said.append(str(error.value))
    engine.zero_grad()
    with pytest.raises(RuntimeError) as error:
        square(engine, rows_of(comm, 0)).backward()
    assert all(p.grad is None for p in engine.model.parameters())
    engine.backward(square(engine, rows_of(comm, 0)))
    engine.step()
    return [*said, str(error.value)]


def test_what_is_called_in_the_wrong_order():
    (first, second, third, fourth), = launch(misused, 1)
    assert first == second == "step without gradients: call engine.backward(loss) first"
    assert third.startswith("the last backward was in no_sync")
    assert fourth == "loss.backward() by itself reduces nothing: call engine.backward(loss)"
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
