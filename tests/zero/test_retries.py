"""Steps tried again after an exception: in forward, in a recomputation, in backward; on all ranks or on one."""

import itertools
import time

import pytest
import torch
from patience import patiently, within
from rank_pool import failure, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_kit import ENGINES, FAST, equal, model_of, parameters_of, rows_of, square, three_layers
from zero_steps import update

from refimpl.comm import CollectiveMismatch, launch
from refimpl.zero import Zero3


class Failing(nn.Module):
    """Two blocks, each recomputed in backward. `failures`: in which calls of the second block's body it raises:
    call 0 is its forward, 1 its recomputation in backward if that went well, and so on."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(nn.Linear(10, 10) for _ in range(3)), reentrant
        self.calls, self.failures = 0, ()

    def body(self, x):
        self.calls += 1
        if self.calls - 1 in self.failures:
            raise ArithmeticError("injected")
        return self.blocks[1](x).tanh()

    def forward(self, x):
        x = self.blocks[0](x).tanh()
        x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.blocks[2](x)


def persevere(engine, x):
    """Try a micro-batch until it goes well; how often that was in vain."""
    for failed in itertools.count():
        try:
            engine.backward(square(engine, x))
        except ArithmeticError:
            assert all(p.grad is None for p in engine.model.parameters()) and not engine.reducer.handles
        else:
            return failed


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2, launch=launch)
def test_a_forward_or_a_recomputation_that_raised_is_tried_again(comm, reentrant):
    found = {}
    for make, fails in itertools.product(ENGINES, ((), (0,), (1,), (1, 3), (0, 2))):  # calls of the second step
        torch.manual_seed(0)
        engine, count = make(Failing(reentrant), comm, FAST, bucket_bytes=200), 0
        for step in range(3):
            engine.model.calls, engine.model.failures = 0, fails if step == 1 else ()
            count += persevere(engine, rows_of(comm, step))
            engine.step()
        found[make, fails] = parameters_of(engine)
        assert make is not Zero3 or engine.gathering.live() == 0
        assert count == len(fails) and equal(found[make, fails], found[make, ()]), (make, fails)


class RaisesInBackward(torch.autograd.Function):
    """In its first backward."""

    raised = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not RaisesInBackward.raised:
            RaisesInBackward.raised = True
            raise ArithmeticError("the first time")
        return gradient


@on_ranks(2, launch=launch)
def test_a_backward_that_raised_is_tried_again(comm):
    for make in ENGINES:
        found = []
        for fails in (True, False):
            RaisesInBackward.raised = not fails
            engine = make(model_of("twice"), comm, FAST, bucket_bytes=200)
            engine.model.two.register_forward_pre_hook(lambda module, args: RaisesInBackward.apply(*args))
            assert persevere(engine, rows_of(comm, 0).requires_grad_()) == fails
            engine.step()
            found.append(parameters_of(engine))
        assert equal(*found)


def agreeing(comm, fails):
    """Rank 1's forward raises in the last unit, where no other rank waits for it any more; all try again."""
    engine, calls, again = Zero3(three_layers(), comm, FAST), itertools.count(), 0

    def injected(module, args, output):
        if comm.rank == 1 and fails and next(calls) == 1:
            raise ArithmeticError("injected")

    engine.model[4].register_forward_hook(injected)
    for step in range(3):
        while True:
            try:
                loss, failed = square(engine, rows_of(comm, step)), 0
            except ArithmeticError:
                failed = 1
            if not comm.all_reduce(torch.tensor(failed), "max").item():
                break
            again += 1
        update(engine, loss)
    return again, parameters_of(engine)


def test_a_forward_that_raised_on_one_rank_is_tried_again_on_all():
    for (failed, ours), (none, expected) in zip(*(launch(agreeing, 2, fails) for fails in (True, False)), strict=True):
        assert (failed, none) == (1, 0) and equal(ours, expected)


@patiently
def test_who_tries_again_alone_is_named_and_nobody_hangs():
    def alone_again(comm):
        """Rank 1's forward raises where the other rank is still to gather, and rank 1 tries again by itself."""
        engine = Zero3(three_layers(), comm, FAST)
        if comm.rank == 1:
            with pytest.raises(ArithmeticError), engine.model[0].register_forward_hook(lambda *_: 1 / 0):
                square(engine, rows_of(comm, 0))
        engine.backward(square(engine, rows_of(comm, 0)))

    start = time.monotonic()
    error = failure("^rank 1 began other collectives than rank 0, from #", alone_again, 2, error=CollectiveMismatch)
    assert error.ranks == (1,)  # it gathers 4 where rank 0 gathers 2: gloo aborts, or all wait for each other
    assert "all_gather of 2," in str(error) and "all_gather of 4," not in str(error).split("rank 0:")[0]
    within(time.monotonic() - start, 10)
    failure("differs in a collective|began other collectives", alone_again, 2, debug=True)
