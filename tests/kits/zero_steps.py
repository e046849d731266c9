"""How the tests of ZeRO train engines, what they read of a step, and engines that save nothing."""

import torch
from torch import nn
from zero_kit import ADAMW, BUCKET, ENGINES, copied, gpt, gradients_of_step, rows_of, square, token_batches, train_gpt

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes

STATES = ("parameters", "gradients", "optimizer state")  # of a ledger


def stack(count, width=64, device=None):
    """Matrices alone."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(count)))


def gpt_engine(make, comm, dtype=None, optimizer=ADAMW, steps=0, micro_batches=1, **options):
    """An engine of the GPT, trained for so many steps. `make`: its class, or its stage."""
    make = ENGINES[make] if isinstance(make, int) else make
    engine = make(gpt(dtype=dtype, device=comm.device), comm, optimizer, bucket_bytes=BUCKET, **options)
    train_gpt(engine, steps, micro_batches)
    return engine


def update(engine, loss):
    engine.backward(loss)
    engine.step()


def train(engine, steps, first=0, **sizes):
    """The engine after steps on this rank's rows."""
    for step in range(first, first + steps):
        update(engine, square(engine, rows_of(engine.comm, step, **sizes)))
    return engine


def plainly(model, optimizer, losses):
    """The parameters of a model that no engine has, after a step from each loss: a generator, which computes them."""
    optimizer = optimizer(model.parameters())
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied(model)


def traced(engine, gradients):
    """(ledger before the update, traffic, trace) of a step; `gradients()` makes them."""
    before = engine.comm.traffic
    with memory.track(engine.model, engine.optimizer) as t:
        gradients()
        now = t.now
        engine.step()
    return now, engine.comm.traffic - before, t


def tracked(engine, *inputs, steps=2):
    """What a tracker has seen of the last of these steps."""
    for _ in range(steps):
        *_, t = traced(engine, lambda: engine.backward(engine.forward(*inputs).sum()))
    return t


def above(model, optimizer, work, *given):
    """The most bytes beyond those that were there before, while something works."""
    with memory.track(model, optimizer) as t:
        before = t.now.total
        work(*given)
    return t.peak.total - before


def most(t, *categories):
    """The most bytes of a category at any moment, or of several together."""
    return t.timeline.nbytes[:, [t.timeline.categories.index(each) for each in categories]].sum(axis=1).max()


def traced_gpt(engine, steps, micro_batches=1):
    """Train as `train_gpt`; (ledger before the update, traffic, trace) of the last step."""
    train_gpt(engine, steps - 1, micro_batches)
    last = token_batches(steps, micro_batches)[-1]
    return traced(engine, lambda: gradients_of_step(engine, last))


def states_of(make, dtype=None, reduce_dtype=None, **options):
    """Ledger of a rank of 4 after the second step's backward, of the GPT."""
    return traced_gpt(gpt_engine(make, FakeCommunicator(0, 4), dtype, reduce_dtype=reduce_dtype, **options), 2)[0]


def as_predicted(make, stage, category, dtype=None, reduce_dtype=None):
    """Whether that ledger has in this category what the closed form of the stage says."""
    expected = model_state_bytes(gpt(dtype=dtype), 4, stage, bucket_bytes=BUCKET, reduce_dtype=reduce_dtype)
    return states_of(make, dtype, reduce_dtype)[category] == expected[category]


class ParametersKept(Zero3):
    """Gathered, and never let go."""
    def _make_parameters(self):
        super()._make_parameters()
        self.gathering._free = lambda bucket: None


class GradientsKept(Zero2):
    """Whole gradients stay."""
    class reducer_type(Zero2.reducer_type):
        def reduced(self, bucket, shard):
            self.hoard = [*getattr(self, "hoard", []), self.flat[bucket]]
            super().reduced(bucket, shard)

        def drop(self):
            super().drop()
            self.hoard = []
