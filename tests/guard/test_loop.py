"""Phases and steps of training loops of several kinds, without a dispatch mode."""

import io

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from refimpl.guard.loop import Loop


class Told:
    """What a loop tells its listener, in words."""

    def __init__(self):
        self.phases, self.batches, self.steps, self.errors = [], [], 0, []

    def enters(self, phase):
        self.phases.append(phase)

    def batch(self, args, kwargs):
        self.batches.append(tuple((*args, *kwargs.values())[0].shape))

    def stepped(self, optimizer):
        self.phases.append("|")
        self.steps += 1

    def failed(self, error):
        self.errors.append(str(error))


def told(train):
    found = Told()
    with Loop(found):
        assert torch._C._len_torch_dispatch_stack() == 0
        train()
    return found


def step(model, optimizer, x, times=1):
    for _ in range(times):
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_phases_of_a_step_with_two_micro_batches_an_evaluation_and_a_save():
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        step(model, optimizer, torch.ones(5, 3), times=2)
        with torch.no_grad():
            model(torch.ones(1, 3))
        torch.save(model.state_dict(), io.BytesIO())
        step(model, optimizer, torch.ones(2, 3))

    found = told(train)
    one = ["forward", "backward", "between"]
    assert found.phases == [*one, *one, "optimizer", "|", "between", "evaluation", "save", "save", *one, "optimizer",
                            "|", "between"]
    assert found.batches == [(5, 3), (5, 3), (2, 3)] and found.steps == 2


def test_pytorch_is_as_it_was():
    model = nn.Linear(3, 3)
    before = (torch.save, torch.optim.Optimizer.__init__, torch.autograd.Variable._execution_engine,
              dict(_global_optimizer_post_hooks))
    told(lambda: step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)))
    assert (torch.save, torch.optim.Optimizer.__init__, torch.autograd.Variable._execution_engine,
            dict(_global_optimizer_post_hooks)) == before
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_hooks_always_called


def test_rounds_of_two_optimizers_are_steps_of_one():
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]

    def train():
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, torch.ones(2, 3))

    assert told(train).steps == 4


def test_an_optimizer_that_takes_another_s_place_leads():
    model = nn.Linear(3, 3)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))

    def train():
        step(model, first, torch.ones(2, 3))
        for _ in range(12):
            step(model, second, torch.ones(2, 3))

    assert told(train).steps > 5


def test_a_step_inside_of_backward_ends_with_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda p: own[p].step())
    found = told(lambda: [model(torch.ones(2, 3)).sum().backward() for _ in range(3)])
    assert found.steps == 3 and found.phases.count("optimizer") == 0


def test_a_closure_is_forward_and_backward():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    found = told(lambda: optimizer.step(closure))
    assert found.phases[:3] == ["forward", "backward", "optimizer"] and found.steps == 1


@pytest.mark.parametrize("compile", [lambda model: model, lambda model: torch.compile(model, backend="eager")],
                         ids=["eager", "compiled"])
def test_an_error_of_each_phase_is_told(compile):
    class Fails(nn.Module):
        def __init__(self, forward, backward):
            super().__init__()
            self.inner, self.fails, self.fails_backward = nn.Linear(3, 3), forward, backward

        def forward(self, x):
            if self.fails:
                raise ValueError("in forward")
            y = self.inner(x)
            if self.fails_backward:
                y.register_hook(lambda gradient: 1 / 0)
            return y

    for forward, backward, words in ((True, False, "in forward"), (False, True, "division by zero")):
        model = compile(Fails(forward, backward))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = Told()
        with Loop(found), pytest.raises((ValueError, ZeroDivisionError)):
            step(model, optimizer, torch.ones(2, 3))
        assert words in found.errors[0]


def test_the_part_that_is_called_is_found_where_the_model_is_not():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(3, 3)

    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert told(lambda: [step(model.part, optimizer, torch.ones(n, 3)) for n in (1, 2, 3)]).batches == [(2, 3), (3, 3)]


def test_a_model_that_is_made_beside_others_has_a_hook_before_its_first_forward():
    others = nn.Linear(3, 3)  # there when the loop begins

    def train():
        model = nn.Linear(3, 3)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 3))

    assert told(train).batches == [(4, 3)] and others is not None
