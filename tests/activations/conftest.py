"""A transfer to a host that is not there: it copies when it is waited for, not before, and notes what it did."""

from contextlib import nullcontext

import pytest
import torch

from refimpl.model import GPT, GPTConfig


class LazyTransfer:
    """A queue like a CUDA stream's: copies are made in order, the latest when somebody waits for them.

    `log`: ("out" or "in", number of the storage in the order of sending) for each copy asked for; `waits` the same for
    what was waited for.
    """

    def __init__(self):
        self.log, self.waits, self._queue, self._numbers = [], [], [], {}

    def offloads(self, tensor):
        return True

    def to_host(self, flat):
        host = torch.full_like(flat, 77)
        self._numbers[id(host)] = number = len(self._numbers)
        return host, self._ask(("out", number), host, flat)

    def to_device(self, host, device):
        flat = torch.full_like(host, 88)
        return flat, self._ask(("in", self._numbers[id(host)]), flat, host)

    def wait(self, ticket):
        self.waits.append(self.log[ticket])
        for i in range(ticket + 1):
            if self._queue[i] is not None:
                target, source = self._queue[i]
                target.copy_(source)
                self._queue[i] = None

    def _ask(self, what, target, source):
        self.log.append(what)
        self._queue.append((target, source))
        return len(self._queue) - 1

    def numbers(self, direction):
        """Which storages were copied in this direction, in order."""
        return [number for which, number in self.log if which == direction]


@pytest.fixture
def lazy():
    return LazyTransfer()


@pytest.fixture
def model():
    """A small GPT-2 with dropout."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=256, context_length=128, layers=2, hidden=64, heads=4, dropout=0.1))


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (3, 67))


@pytest.fixture
def gradients(model, tokens):
    """`gradients(context)` of one step whose forward runs in the context."""
    def of_a_step(context=None):
        torch.manual_seed(1)  # the same dropout each time
        with context or nullcontext():
            loss = model(tokens, tokens)
        return torch.autograd.grad(loss, list(model.parameters()))
    return of_a_step


@pytest.fixture
def expected(gradients):
    """The gradients of a plain step."""
    return gradients()
