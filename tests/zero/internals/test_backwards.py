"""When a module's backward has ended: in the reverse order of forward, whatever was recomputed or shared."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from refimpl.zero.internals.backwards import Backwards, tensors_in


class Followed:
    """Modules whose calls and backwards are written down: "+name" where a backward begins, "-name" where it has
    ended."""

    def __init__(self, **modules):
        self.log, self.running = [], False
        names = {module: name for name, module in modules.items()}
        self.backwards = Backwards(lambda module: self.log.append(f"+{names[module]}"),
                                   lambda module: self.log.append(f"-{names[module]}"))
        for module in modules.values():
            module.register_forward_pre_hook(lambda module, args: self.backwards.enter(module, self.running))
            module.register_forward_hook(self.left, always_call=True)

    def left(self, module, args, output):
        self.backwards.leave(output, self.running)

    def backward(self, loss):
        self.running = True
        loss.backward()
        self.backwards.end_all()
        self.running = False
        return " ".join(self.log)


def linears(count):
    return [nn.Linear(4, 4) for _ in range(count)]


X = torch.ones(2, 4)


def test_one_ends_where_the_one_before_it_begins():
    a, b, c = linears(3)
    assert Followed(a=a, b=b, c=c).backward(c(b(a(X))).sum()) == "+c -c +b -b +a -a"


def test_a_module_around_others_ends_after_them():
    """Both begin at one tensor, the output of both."""
    around = nn.Sequential(*linears(3))
    _, a, b = around
    assert Followed(a=a, b=b, around=around).backward(around(X).sum()) == "+b +around -b +a -around -a"


def test_one_that_is_called_twice_ends_twice():
    a, b = linears(2)
    assert Followed(a=a, b=b).backward(a(b(a(X))).sum()) == "+a -a +b -b +a -a"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("regions", [1, 2])
def test_what_is_recomputed_takes_the_place_of_its_first_call(reentrant, regions):
    a, b, c = linears(3)
    followed, x = Followed(a=a, b=b, c=c), X.clone().requires_grad_()
    x = a(x)
    if regions == 1:
        x = checkpoint(lambda x: c(b(x)), x, use_reentrant=reentrant)
    else:
        for layer in (b, c):
            x = checkpoint(layer, x, use_reentrant=reentrant)
    assert followed.backward(x.sum()) == "+c -c +b -b +a -a"


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_that_is_recomputed_twice_ends_twice(reentrant):
    a, b = linears(2)
    followed, x = Followed(a=a, b=b), X.clone().requires_grad_()
    for layer in (a, b, a):
        x = checkpoint(layer, x, use_reentrant=reentrant)
    assert followed.backward(x.sum()) == "+a -a +b -b +a -a"


def test_an_input_of_several_modules_is_added_up_as_without():
    """An encoder's output that each decoder layer takes twice: 32 values with sums that depend on their order."""
    def gradient(follows):
        torch.manual_seed(0)
        layers, memory = [nn.Bilinear(8, 8, 8) for _ in range(4)], torch.randn(32, 8, requires_grad=True)
        followed = Followed(**{str(i): layer for i, layer in enumerate(layers)}) if follows else None
        x = memory.tanh()
        for layer in layers:
            x = layer(x, memory) + memory
        followed.backward(x.sum()) if follows else x.sum().backward()
        return memory.grad

    assert torch.equal(gradient(True), gradient(False))


def test_what_an_evaluation_calls_is_not_taken_for_a_region():
    a, = linears(1)
    followed = Followed(a=a)
    followed.backwards.evaluating = True
    with torch.no_grad():
        a(X)
    assert not followed.backwards.is_recomputed_later(a)
    followed.backwards.evaluating = False
    with torch.no_grad():
        a(X)
    assert followed.backwards.is_recomputed_later(a)
    followed.backwards.forget()
    assert not followed.backwards.is_recomputed_later(a)


def test_tensors_are_found_in_whatever_a_module_returns():
    x = torch.ones(1)
    assert len(list(tensors_in([x, {"a": (x, None)}, 3]))) == 2


class WithBalance(nn.Linear):
    """Computes more after its output, which it keeps."""

    def forward(self, x):
        y = super().forward(x)
        self.balance = (self.weight * 2).sum()
        return y


def test_one_that_computes_more_after_its_output_begins_with_that():
    """Its backward begins before that of what it kept, and also if nothing else is in the loss."""
    a = WithBalance(4, 4)
    for with_output in (True, False):
        followed, x = Followed(a=a), a(X)
        a.balance.grad_fn.next_functions[0][0].register_hook(lambda *_, log=followed.log: log.append("balance"))
        loss = x.sum() + a.balance if with_output else a.balance
        followed.backwards.begin_early(loss)
        assert followed.backward(loss) == "+a balance -a"
