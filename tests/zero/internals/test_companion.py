"""An optimizer that changes its rule later is found at that step, on all ranks, before anything is written."""

import functools
import itertools

import pytest
import torch
from odd_optimizers import Late
from optimizer_classes import optimizers
from rank_pool import on_ranks
from saving_kit import plain
from torch.optim.optimizer import register_optimizer_step_post_hook
from zero_kit import ADAMW, SHARDED, Elsewhere, equal, gpt, gradients_of_step, parameters_of, train_gpt
from zero_steps import gpt_engine

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.offload import CPUAdam
from refimpl.zero import Zero1, Zero2
from refimpl.zero.internals.companion import Companion
from refimpl.zero.update import ShardedUpdate

ALONE = FakeCommunicator(0, 1)
SAID = "Late updates an element by others .*, at step {} and not before, on tensors such as embedding.weight, and a"
WAYS = {"device": dict, "store": lambda: {"store": Elsewhere()},
        "host": lambda: {"update": functools.partial(ShardedUpdate, device="cpu")}}


def refused(engine, steps, at):
    """Train; the step that is refused changes nothing."""
    train_gpt(engine, steps)
    before = parameters_of(engine)
    gradients_of_step(engine)
    with pytest.raises(RuntimeError, match=SAID.format(at)):
        engine.step()
    return equal(parameters_of(engine), before) and engine._steps == at - 1


@pytest.mark.parametrize(("make", "way"), list(itertools.product(SHARDED, WAYS)))
@on_ranks(2)
def test_a_rule_that_begins_at_step_10_is_refused_there(comm, make, way):
    assert refused(gpt_engine(make, comm, optimizer=Late, **WAYS[way]()), 9, 10)


@pytest.mark.parametrize(("begin", "counted"), list(itertools.product((4, 7, 16), ("state", "group"))))
def test_at_any_step_however_it_is_counted(begin, counted):
    engine = gpt_engine(Zero2, ALONE, optimizer=functools.partial(Late, begin=begin, counted=counted))
    assert refused(engine, begin - 1, begin)


def test_a_schedule_that_changes_the_rule():
    engine = gpt_engine(Zero1, ALONE, optimizer=functools.partial(Late, begin=1000), steps=4)
    engine.param_groups[0].update(normed=True)
    assert refused(engine, 0, 5)


def test_it_counts_on_after_a_load(tmp_path):
    make = functools.partial(Late, begin=9)
    gpt_engine(Zero2, ALONE, optimizer=make, steps=6).save(tmp_path)
    engine = gpt_engine(Zero1, ALONE, optimizer=make)
    engine.load(tmp_path)
    assert refused(engine, 2, 9)


NAMES = [*(f"torch {name}" for name in ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "ASGD", "Rprop", "Adamax", "Adagrad",
                                        "Adadelta", "RMSprop")), "timm lion", "timm adan", "timm nadamw"]


def test_those_that_treat_each_element_by_itself_go_on():
    """With a learning rate that warms up from 0, decays, and is large."""
    named, found = list(gpt().named_parameters()), optimizers()
    for make in map(found.__getitem__, NAMES):
        companion, (group, *_) = Companion(make, None, named), make([torch.nn.Parameter(torch.zeros(2))]).param_groups
        for step in range(17):
            companion.step([{**group, "lr": group["lr"] * (0, 1, 100, 0.1)[step % 4]}])
        assert companion.sides is not None


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}, {"amsgrad": True},
                                     {"lr": torch.tensor(1e-3)}])
def test_whatever_kernel_it_has(options):
    companion = Companion(functools.partial(torch.optim.AdamW, **options), None, list(gpt().named_parameters()))
    for _ in range(8):
        companion.step([{"lr": 0.1}])
    assert companion.sides is not None


def test_what_cannot_run_on_a_host_is_not_watched():
    class OnGPUs(torch.optim.SGD):
        def step(self):
            raise NotImplementedError
    companion = Companion(OnGPUs, None, list(gpt().named_parameters()))
    companion.step([{"lr": 0.1}])
    assert companion.sides is None
    companion.step([{"lr": 0.1}])


def test_nothing_outside_sees_it():
    def read(watched):
        engine = plain(ALONE, 2, shape=(64, 64))
        if not watched:
            engine._companion = None
        torch.manual_seed(3)
        engine.backward(engine.forward(torch.ones(2, 64)).square().mean())
        heard = []
        handle = register_optimizer_step_post_hook(lambda *_: heard.append(1))
        with memory.track(engine.model, engine.optimizer) as t:
            engine.step()
        handle.remove()
        return dict(t.peak), len(t.ops), len(heard), torch.rand(1).item()
    assert read(True) == read(False)


def test_what_is_elementwise_by_construction_and_what_has_no_values_is_not_watched():
    assert gpt_engine(Zero2, ALONE, update=CPUAdam())._companion is None
    assert gpt_engine(0, ALONE, optimizer=Late)._companion is None
    assert gpt_engine(Zero2, ALONE)._companion.names == ["embedding.weight"]
    assert Companion(ADAMW, None, [("scale", torch.nn.Parameter(torch.tensor(1.0)))]).sides is None
