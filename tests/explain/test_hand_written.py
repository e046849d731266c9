"""Steps of an optimizer that is written by hand: as many as are made, with the peaks of torch.optim's."""

import textwrap

import pytest

from refimpl.explain import Explanation, Script, run

HEAD = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
rate = 0.01
def backward(x):
    model(x).square().mean().backward()
"""
PARAMETERS = 4 * (2 * 128 * 512 + 512 + 128)
LARGEST = 4 * 128 * 512
UPDATES = {  # what each takes beyond SGD's peak, which is in backward
    "p.data.add_(p.grad, alpha=-rate)": 0, "p.data.mul_(0.999).add_(p.grad, alpha=-rate)": 0,
    "torch.sub(p.data, p.grad, alpha=rate, out=p.data)": 0, "torch._foreach_add_([p.data], [p.grad], alpha=-rate)": 0,
    "p.data -= rate * p.grad": LARGEST, "p.data = p.data - rate * p.grad": 2 * LARGEST}


@pytest.fixture
def ran(tmp_path):
    def ran(text, head=HEAD):
        (tmp_path / "train.py").write_text(head + textwrap.dedent(text))
        return Explanation(run(Script(tmp_path / "train.py")))
    return ran


@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize("update", UPDATES)
def test_three_steps_are_counted_and_take_what_sgd_takes(ran, update, steps):
    loop = f"""
        for _ in range({steps}):
            backward(torch.randn(64, 128))
            for p in model.parameters():
                {{}}
            model.zero_grad()
        """
    sgd = ran("optimizer = torch.optim.SGD(model.parameters(), rate, foreach=False)\n" + textwrap.dedent(
        loop.format("pass").replace("model.zero_grad()", "optimizer.step(); model.zero_grad()")))
    own = ran(loop.format(update))
    assert own.run.done and own.run.words == "3 steps of an optimizer of its own, then ended"
    assert [*own.phases] == [*sgd.phases] and own.phases["backward"] == sgd.phases["backward"]
    in_step = sgd.phases["optimizer"] + UPDATES[update]
    assert own.phases["optimizer"] == pytest.approx(in_step, abs=2048)
    assert own.timeline.last_peak == max(own.phases["backward"], own.phases["optimizer"])
    assert own.trains and not own.run.recording.waiting and own.as_dict()["grows"] == []


@pytest.mark.parametrize("loop", ["""
    for i in range(12):
        backward(torch.randn(64, 128))  # micro-batches
        if i % 2:
            for p in model.parameters():
                p.data.sub_(rate * p.grad)
    """, """
    def update(p):
        p.data.sub_(rate * p.grad)
        p.grad = None
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)  # in backward
    for _ in range(9):
        backward(torch.randn(64, 128))
    """, """
    w = torch.randn(128, 64, requires_grad=True)
    for _ in range(9):
        loss = (torch.randn(64, 128) @ w).square().mean()
        loss.backward()
        w = (w - rate * w.grad).detach().requires_grad_()  # another leaf
    """])
def test_other_ways_to_update_have_three_steps(ran, loop):
    assert ran(loop).run.words == "3 steps of an optimizer of its own, then ended"


def test_two_networks_that_take_turns_make_three_steps_each(ran):
    recording = ran("""
        critic = nn.Linear(128, 1)
        def update(net):
            for p in net.parameters():
                p.data.sub_(rate * p.grad)
            model.zero_grad(), critic.zero_grad()
        for _ in range(9):
            fake = model(torch.randn(8, 128))
            critic(fake.detach()).mean().backward()
            update(critic)
            critic(fake).mean().backward()
            update(model)
        """).run.recording
    assert len(recording.steps) == 6 and len(recording.saving) == 6


def test_gradients_without_an_update_are_no_steps(ran):
    assert ran("""
        for _ in range(9):
            backward(torch.randn(64, 128, requires_grad=True))
        """).run.words == "ended by itself, after no optimizer step"


def test_beside_an_optimizer_of_torch_nothing_by_hand_is_a_step(ran):
    """As the inputs that an attack changes, or weights that are clipped."""
    assert ran("""
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(9):
            x = torch.randn(64, 128, requires_grad=True)
            for _ in range(4):
                backward(x)
                x.data += x.grad.sign()
                next(model.parameters()).data.clamp_(-1, 1)
            optimizer.step()
        """).run.words == "3 steps of Adam, then ended"


def test_the_class_of_optimizers_is_as_it_was(ran):
    import torch

    before = torch.optim.Optimizer.__init__
    ran("backward(torch.randn(8, 128))")
    assert torch.optim.Optimizer.__init__ is before


def test_an_input_that_changes_is_no_step_of_the_model_s(ran):
    assert ran("""
        x = torch.randn(64, 128, requires_grad=True)
        for _ in range(9):
            backward(x)
            x.data += x.grad.sign()
        """).run.words == "ended by itself, after no optimizer step"
