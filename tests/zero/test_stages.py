"""Every stage beside torch's DDP and a single process: parameters, bytes and traffic, on real ranks."""

import contextlib
import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3
from refimpl.zero.closed_forms import model_state_bytes, paper_bytes, step_traffic

ENGINES = (DataParallel, Zero1, Zero2, Zero3)
CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=3, hidden=32, heads=4)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
ROWS, BUCKET = 12, 20_000


def build(config=CONFIG, dtype=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT(config, dtype=dtype)


def batches(steps, micro_batches):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (steps, micro_batches, ROWS, 16), generator=generator)


def parameters_of(engine):
    with engine.gathered() if isinstance(engine, Zero3) else contextlib.nullcontext():
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def train(engine, comm, steps=10, micro_batches=1, trace=False):
    """The parameters after some steps; or with `trace` the last one's (ledger before its step, traffic)."""
    n = ROWS // comm.world_size
    for tokens in batches(steps, micro_batches):
        before = comm.traffic
        with memory.track(engine.model, engine.optimizer) as t:
            for i, rows in enumerate(tokens):
                mine = rows[comm.rank * n : (comm.rank + 1) * n]
                with engine.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
                    engine.backward(engine.forward(mine, mine) / micro_batches)
            now = t.now
            engine.step()
    return (now, comm.traffic - before, t) if trace else parameters_of(engine)


def single(steps=10):
    model = build()
    optimizer = ADAMW(model.parameters())
    for tokens in batches(steps, 1):
        model(tokens[0], tokens[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def ddp(comm, steps=10):
    model = build()
    wrapped, n = DistributedDataParallel(model), ROWS // comm.world_size
    optimizer = ADAMW(model.parameters())
    for tokens in batches(steps, 1):
        mine = tokens[0, comm.rank * n : (comm.rank + 1) * n]
        wrapped(mine, mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def everything(comm):
    found = {engine.__name__: train(engine(build(), comm, ADAMW, bucket_bytes=BUCKET), comm) for engine in ENGINES}
    return found, ddp(comm)


def farthest(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in b)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_after_ten_steps(world_size):
    alone, answers = single(), launch(everything, world_size)
    for found, other in answers:
        for name, ours in found.items():
            assert farthest(ours, other) <= (1e-6 if world_size > 2 else 0), name
            assert farthest(ours, answers[0][0][name]) == 0  # ranks agree to the bit
            assert farthest(ours, found["Zero3"]) <= (1e-6 if world_size > 2 else 0)
            assert farthest(ours, alone) <= 1e-4  # another order of sums, which Adam's division makes larger


# --- bytes and traffic -----------------------------------------------------------------------------------------------


def readings(comm, micro_batches):
    found = {}
    for engine in ENGINES:
        now, sent, t = train(engine(build(), comm, ADAMW, bucket_bytes=BUCKET), comm, 3, micro_batches, trace=True)
        found[engine.__name__] = now, dict(sent), t.peak
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_and_traffic_are_those_of_the_closed_forms(world_size, micro_batches):
    model = build()
    for rank, found in enumerate(launch(readings, world_size, micro_batches)):
        for stage, engine in enumerate(ENGINES):
            now, sent, _ = found[engine.__name__]
            expected = model_state_bytes(model, world_size, stage, rank=rank, bucket_bytes=BUCKET)
            for category in ("parameters", "gradients", "optimizer state"):
                assert now[category] == expected[category], (engine, category)
            assert sent == dict(step_traffic(model, world_size, stage, rank=rank, micro_batches=micro_batches,
                                             bucket_bytes=BUCKET)), engine


def test_the_papers_table_1():
    """Rajbhandari et al. 2020, table 1: 7.5B, 128B and 1T parameters, GB on each rank."""
    for N, rows in {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
                    256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}.items():
        for stage, GB in zip((1, 2, 3), rows, strict=True):
            assert paper_bytes(7.5e9, N, stage) / 1e9 == pytest.approx(GB, rel=0.01, abs=0.006)
    assert paper_bytes(1e12, 1024, 3) / 1e9 == pytest.approx(15.6, rel=0.01)
    assert paper_bytes(128e9, 64, 2) / 1e9 == pytest.approx(284, rel=0.01)


class GradientsKept(Zero2):
    """The mutant: whole gradients stay."""

    def _reduced(self, bucket, shard):
        self.hoard = getattr(self, "hoard", []) + [self._gradients[bucket]]
        super()._reduced(bucket, shard)

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.hoard = []


class ParametersKept(Zero3):
    """The mutant: gathered, and never let go."""

    def _make_optimizer(self, *args):
        self.gathering._free = lambda bucket: None
        return super()._make_optimizer(*args)


class NothingSharded(DataParallel):
    """The mutant: right parameters, nothing saved."""


@pytest.mark.parametrize(("mutant", "stage", "category"), [
    (NothingSharded, 1, "optimizer state"), (GradientsKept, 2, "gradients"), (ParametersKept, 3, "parameters")])
def test_versions_that_save_nothing_fail(mutant, stage, category):
    comm = FakeCommunicator(0, 4)
    expected = model_state_bytes(build(), 4, stage, bucket_bytes=BUCKET)
    for engine, equal in ((mutant, False), (ENGINES[stage], True)):
        now, _, _ = train(engine(build(), comm, ADAMW, bucket_bytes=BUCKET), comm, 2, trace=True)
        assert (now[category] == expected[category]) == equal


@pytest.mark.parametrize("engine", [Zero1, Zero2, Zero3])
def test_what_is_under_way_does_not_grow_with_the_model(engine):
    """The peak above the model states, with few activations."""
    above = []
    for layers in (4, 12):
        config, comm = GPTConfig(vocab_size=64, context_length=16, layers=layers, hidden=64, heads=4), FakeCommunicator(
            0, 8)
        engine_ = engine(build(config), comm, ADAMW, bucket_bytes=100_000, **(
            {"look_ahead": 60_000} if engine is Zero3 else {}))
        x = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(3):
            with memory.track(engine_.model, engine_.optimizer) as t:
                engine_.backward(engine_.forward(x, x))
                engine_.step()
        states = model_state_bytes(engine_.model, 8, ENGINES.index(engine), bucket_bytes=100_000)
        activations = max(moment["activations"] for moment in t.moments) if hasattr(t, "moments") else 0
        above.append(t.peak.total - states.total - activations)
    assert above[1] <= above[0] + 40_000, above
