"""Which optimizers take flat pieces: those that the trial lets pass train alike at all stages, and no others."""

import contextlib
import functools
import warnings

import pytest
import torch
from odd_optimizers import Codes, InBlocks, Keeping
from optimizer_classes import optimizers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from zero_kit import ENGINES, farthest, parameters_of
from zero_steps import update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import DataParallel, Zero1, Zero3
from refimpl.zero import engine as engines
from refimpl.zero.internals.elementwise import check_elementwise

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
REFUSED = r"updates an element by others .*, and a rank has flat pieces: use it at stage 0 \(DataParallel\), or"


def named(*shapes, device="cpu"):
    return [(f"p{i}", nn.Parameter(torch.zeros(shape, device=device))) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("make", [
    ADAMW, functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.AdamW, foreach=True),
    functools.partial(torch.optim.AdamW, foreach=False, amsgrad=True), functools.partial(torch.optim.AdamW, lr=0.0),
    functools.partial(torch.optim.AdamW, lr=torch.tensor(1e-9), maximize=True), torch.optim.RMSprop, torch.optim.ASGD,
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), torch.optim.Rprop])
def test_what_treats_each_element_by_itself_passes(make):
    check_elementwise(make, None, named((), (1,), (3,), (2, 5), (2, 2, 3), (1, 2, 3, 4, 5)))


class Looking(torch.optim.SGD):
    def each(self):
        """(param group, parameter)."""
        return [(group, p) for group in self.param_groups for p in group["params"]]


class Normed(Looking):
    """It divides by the norm of a tensor's gradient, in groups that say so."""
    def step(self):
        for group, p in self.each():
            if group.get("normed", group["weight_decay"]):
                p.grad /= p.grad.norm()
        super().step()


class Clipping(Looking):
    """By the norm of all gradients."""
    def step(self):
        nn.utils.clip_grad_norm_([p for _, p in self.each()], 1.0)
        super().step()


class Noisy(Looking):
    def step(self):
        super().step()
        for _, p in self.each():
            p.add_(torch.randn_like(p), alpha=1e-3)


class Flat(Looking):
    """It is made for matrices, and for vectors alone."""
    def step(self):
        if any(p.dim() != group["dim"] for group, p in self.each()):
            raise IndexError("no rows")
        super().step()


@pytest.mark.parametrize("make", [Normed, Clipping, Noisy])
def test_what_does_not_is_refused_by_name(make):
    with pytest.raises(TypeError, match=f"{make.__name__} {REFUSED}"):
        check_elementwise(functools.partial(make, lr=0.1, weight_decay=0.1), None, named((4, 3)))


def test_each_group_is_tried_with_its_options_and_its_numbers_of_dimensions():
    parameters = named((4, 3), (3,), (2,))
    matrix, *vectors = [p for _, p in parameters]
    def groups(first, second):
        return lambda named: [{"params": [matrix], **first}, {"params": iter(vectors), **second}]
    normed, flat = (functools.partial(each, lr=0.1) for each in (Normed, Flat))
    check_elementwise(normed, groups({}, {"weight_decay": 0.0}), parameters)
    for first, second in (({"normed": True}, {}), ({}, {"weight_decay": 0.1}), ({}, {"normed": 3})):
        with pytest.raises(TypeError, match=REFUSED):
            check_elementwise(normed, groups(first, second), parameters)
    with pytest.raises(TypeError, match=r"Flat raises IndexError on pieces of tensors \(no rows\), and a rank has"):
        check_elementwise(flat, groups({"dim": 2}, {"dim": 1}), parameters)
    with pytest.raises(TypeError, match=r"Flat was tried on small tensors and raised IndexError \(no rows\): expected"):
        check_elementwise(flat, groups({"dim": 1}, {"dim": 1}), parameters)


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor])
def test_matrices_alone(make):
    with pytest.raises(TypeError, match=f"{make.__name__} .*and a rank has flat pieces"):
        check_elementwise(make, None, named((4, 3)))


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 3, 1, 1)])
@pytest.mark.parametrize("how", [{}, {"block": 128}, {"block": 2048}, {"least": 0}, {"block": 128, "least": 0}])
def test_what_quantises_large_tensors_alone_is_refused(how, shape):
    with pytest.raises(TypeError, match=f"InBlocks {REFUSED}"):
        check_elementwise(functools.partial(InBlocks, **how), None, named(shape))


@pytest.mark.parametrize(("kept", "said"), [
    (lambda p: p.as_subclass(Codes), "a Codes"), (lambda p: torch.zeros(p.numel() // 2), "shape"),
    (lambda p: torch.zeros(p.numel() + 1), "shape"), (lambda p: [p], "a list"), (torch.square, None),
    (torch.sum, None), (lambda p: p.bfloat16(), None), (lambda p: None, None)])
def test_what_keeps_states_that_cannot_be_cut_is_refused(kept, said):
    make, given = functools.partial(Keeping, kept=kept), named((4, 3))
    if said is None:
        return check_elementwise(make, None, given)
    with pytest.raises(TypeError, match=rf"Keeping cannot be saved, stored or loaded .*'kept' of a piece is {said}.*: "
                       r"expected a number, or a tensor of the shape .* at stage 0"):
        check_elementwise(make, None, given)


@pytest.mark.parametrize("make", ENGINES)
def test_an_engine_refuses_before_it_changes_anything(make):
    model = nn.Linear(4, 3)
    before = [(p.data_ptr(), p._post_accumulate_grad_hooks) for p in model.parameters()]
    if make is DataParallel:
        make(model, FakeCommunicator(0, 2), torch.optim.Adafactor)
        return
    with pytest.raises(TypeError, match=f"Adafactor {REFUSED}"):
        make(model, FakeCommunicator(0, 2), torch.optim.Adafactor)
    assert before == [(p.data_ptr(), p._post_accumulate_grad_hooks) for p in model.parameters()]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_nothing_outside_sees_it():
    heard, made, before = [], [], torch.get_rng_state()
    handle = register_optimizer_step_post_hook(lambda *_: heard.append(1))
    def make(groups):
        made.append(torch.optim.AdamW(groups))
        return made[-1]
    given = named((4, 3), (3,))
    try:
        with memory.track() as t, torch.device("meta"):
            check_elementwise(make, None, given)
        assert t.peak.total == 0 and not t.ops and not heard and len(made) == 4
        with pytest.raises(TypeError):
            check_elementwise(functools.partial(Noisy, lr=0.1), None, given)
        assert torch.equal(torch.get_rng_state(), before)
        SGD([nn.Parameter(torch.zeros(1))]).step()
        assert heard == [1]
    finally:
        handle.remove()


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_dry_run_tries_it_on_a_cpu(device):
    def build(make):
        with torch.device(device):
            check_elementwise(make, None, [("p", nn.Parameter(torch.zeros(4, 3)))])
    for make in (ADAMW, functools.partial(torch.optim.AdamW, fused=True)):
        with FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else contextlib.nullcontext():
            build(make)
            if device != "cpu":
                build(functools.partial(torch.optim.AdamW, capturable=True))
            with pytest.raises(TypeError, match=f"Adafactor {REFUSED}"):
                build(torch.optim.Adafactor)
    t = memory.dry_run(lambda: Zero1(nn.Linear(4, 3), FakeCommunicator(0, 2), ADAMW))
    assert t.notes == [] and t.peak["optimizer state"] == 0


def model():
    """The first layer's weight is before a norm: its gradient is across it, which some optimizers look for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 20, bias=False), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 17))


def trained(engine):
    comm = engine.comm
    for step in range(3):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step)).chunk(comm.world_size)[comm.rank]
        update(engine, engine.forward(x).square().mean())
    return parameters_of(engine)


def compared(comm):
    """{name: (what the trial says, whether stage 1 makes of it what stage 0 makes)}, of every class."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: compared_one(comm, make) for name, make in optimizers().items()}


def compared_one(comm, make):
    said, check = None, engines.check_elementwise
    try:
        check(make, None, list(model().named_parameters()))
    except TypeError as error:
        said = str(error)
    engines.check_elementwise = lambda *_: None
    try:
        made = (engine(model(), comm, make, bucket_bytes=1000) for engine in (DataParallel, Zero1))
        return said, farthest(*map(trained, made)) <= 1e-6
    except Exception:
        return said, False
    finally:
        engines.check_elementwise = check


def test_accepted_is_what_trains_alike():
    first, second = launch(compared, 2)
    assert first == second and len(first) > 80
    wrong = {name: each for name, each in first.items() if (each[0] is None) != each[1]}
    assert wrong == {}
    accepted = {name for name, (said, _) in first.items() if said is None}
    assert {f"torch {name}" for name in ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "ASGD", "Rprop", "Adamax", "Adagrad",
                                         "Adadelta", "RMSprop")} | {"timm lion", "timm adan"} <= accepted
    assert not accepted & {"torch Adafactor", "torch Muon", "torch LBFGS", "torch SparseAdam", "timm lamb", "timm lars",
                           "timm adafactor", "timm adafactorbv", "timm adamp", "transformers Adafactor"}


def test_stage_3_refuses_as_stage_1_does():
    with pytest.raises(TypeError, match=REFUSED):
        Zero3(model(), FakeCommunicator(0, 2), functools.partial(Clipping, lr=0.1))
