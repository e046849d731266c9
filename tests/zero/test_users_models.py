"""Models and training loops as users write them: each stage trains them as torch's DDP does, to the bit at world 2;
what it cannot train it refuses by name."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from rank_pool import alike, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_kit import ENGINES, FAST, SGD, WIDTH, Layers, equal, model_of, parameters_of, rows_of, square, three_layers
from zero_steps import plainly, train, update

from refimpl.comm import FakeCommunicator
from refimpl.zero import DataParallel, Zero2, Zero3


def linear(**options):
    return nn.Linear(WIDTH, WIDTH, **options)


class Shared(nn.Module):
    """Two parameters whose gradients autograd hands out in one storage."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(8, WIDTH))
        self.head = linear()

    def forward(self, x):
        return self.head(x[:, None] + (self.a[None] + self.b[None])).sum(1)


class Listed(nn.Module):
    """Parameters in lists, dicts and a module that has no forward; layers in lists of lists and of dicts."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.names = nn.ParameterDict({"shift": nn.Parameter(torch.randn(WIDTH))})
        self.pairs = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))
        self.more = nn.ModuleList([nn.ModuleDict({"up": linear(), "down": linear()})])
        self.other = nn.Module()
        self.other.weight, self.other.layer = nn.Parameter(torch.randn(WIDTH)), linear()

    def forward(self, x):
        x = x * self.scales[0] * self.scales[1] + self.names["shift"]
        for one, two in self.pairs:
            x = two(one(x).tanh()) + x
        return self.other.layer(self.more[0]["down"](self.more[0]["up"](x).tanh()) * self.other.weight)


class Computed(nn.Module):
    """Weights that are computed of others: by a hook, by parametrizations; one layer twice in a list."""

    def __init__(self):
        super().__init__()
        parametrized = nn.utils.parametrizations.weight_norm(linear(bias=False))
        self.layers = nn.ModuleList([parametrized, parametrized])
        self.hooked, self.last = linear(), nn.utils.parametrizations.weight_norm(linear(bias=False))
        self.hooked.register_forward_pre_hook(lambda module, x: (x[0] * module.weight.norm(),))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(self.hooked(x))


@dataclasses.dataclass
class Answer:
    hidden: list


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x):
        return Answer([self.layers(x.hidden[0] if isinstance(x, Answer) else x)])


class Dataclasses(nn.Sequential):
    """Of blocks that return dataclasses, as those of Hugging Face return a ModelOutput."""
    def forward(self, x):
        return super().forward(x).hidden[0]


class Scaled(nn.Embedding):
    """One whose gradient needs its weight."""
    def forward(self, indices):
        return super().forward(indices) * (self.weight * self.weight).mean()


class Table(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.last = table, linear()

    def forward(self, x):
        return self.last(self.table((x[:, 0].abs() * 9).long().clamp(max=9)) + x)


class Mixed(nn.Module):
    """Two dtypes, and parameters of no elements; a batch norm."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = linear(), linear(dtype=torch.float64), nn.BatchNorm1d(WIDTH)
        self.none, self.flat = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        return self.norm(self.two(self.one(x).double()).float()) + self.none.sum() + self.flat.sum()


class Attending(nn.Module):
    """torch's attention reads the weight of a layer in it that it never calls."""

    def __init__(self):
        super().__init__()
        self.token, self.attention = nn.Parameter(torch.randn(1, WIDTH)), nn.MultiheadAttention(WIDTH, 2)
        self.blocks = Layers(2)

    def forward(self, x):
        x = x + self.token
        return self.blocks(self.attention(x, x, x, need_weights=False)[0])


MODELS = {"shared": Shared, "listed": Listed, "computed": Computed, "mixed": Mixed, "attending": Attending,
          "dataclasses": lambda: Dataclasses(*(Answering() for _ in range(3))),
          "table": lambda: Table(Scaled(10, WIDTH))}


def made(name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return MODELS[name]()


@on_ranks(2)
def test_to_the_bit_as_ddp(comm):
    for name in MODELS:
        model = made(name)
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        expected = plainly(model, FAST, (square(ddp, rows_of(comm, step)) for step in range(3)))
        for make in ENGINES:
            ours = parameters_of(train(make(made(name), comm, FAST, bucket_bytes=300), 3))
            assert equal(ours, expected), (name, make)


class Blocks(Layers):
    """A parameter of the model's own beside its blocks."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.token = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return super().forward(x + self.token)


class TakesAll(Zero3):
    """The mutant: the model is a unit of all that is in it."""
    def __init__(self, model, *args, **options):
        super().__init__(model, *args, units=[model], **options)


@pytest.mark.parametrize("make", [Zero3, TakesAll])
@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_beside_the_blocks_does_not_bring_them_all(make, named):
    model, live = Blocks(8, 64), []
    options = {"units": [model, *model]} if named and make is Zero3 else {}
    engine = make(model, FakeCommunicator(0, 2), SGD, look_ahead=0, **options)
    model[4].register_forward_pre_hook(lambda *_: live.append(engine.gathering.live()))
    engine.backward(engine.forward(torch.ones(1, 64)).sum())
    assert (live[0] == 64 + 64 * 65) == (make is Zero3)


@on_ranks(2)
def test_compiled_zeroed_or_begun_without_the_engine(comm):
    """Steps among other things that users do."""
    found = {}
    for make in ENGINES:
        for way in ("plain", "compiled", "zero_grad", "tried without the engine"):
            engine = make(three_layers(), comm, FAST, bucket_bytes=300)
            forward = torch.compile(engine.model, backend="eager") if way == "compiled" else engine.forward
            for step in range(3):
                if way == "zero_grad":
                    engine.backward(square(engine, rows_of(comm, 9)))
                    engine.zero_grad(set_to_none=False)
                if way.startswith("tried"):
                    with pytest.raises(RuntimeError, match=r"loss.backward\(\) by itself reduces nothing"):
                        square(engine, rows_of(comm, 9)).backward()
                    engine.zero_grad()
                update(engine, forward(rows_of(comm, step)).square().mean())
            found[make, way] = parameters_of(engine)
            assert equal(found[make, way], found[DataParallel, "plain"]), (make, way)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.some, self.uses = linear(), linear(), True

    def forward(self, x):
        x = self.always(x)
        return self.some(x) if self.uses else x


@pytest.mark.parametrize("make", ENGINES)
def test_a_parameter_that_this_step_does_not_use_is_left_as_it_is(make):
    engine, seen = make(Sometimes(), FakeCommunicator(0, 1), FAST), []
    for uses in (True, False):
        engine.model.uses = uses
        seen.append(parameters_of(train(engine, 1)))
    assert torch.equal(seen[0]["some.weight"], seen[1]["some.weight"])
    assert not torch.equal(seen[0]["always.weight"], seen[1]["always.weight"])


@on_ranks(2)
def test_gradients_that_another_dtype_adds_up_come_back_to_all(comm):
    engine = DataParallel(model_of("twice").bfloat16(), comm, SGD, reduce_dtype=torch.float32)
    engine.backward(square(engine, rows_of(comm, 0).bfloat16()))
    assert all(alike(comm, p.grad) for p in engine.model.parameters())


def test_no_sync_within_no_sync():
    engine = DataParallel(three_layers(), FakeCommunicator(0, 2), SGD)
    with engine.no_sync():
        with engine.no_sync():
            pass
        engine.backward(square(engine, torch.ones(2, WIDTH)))
    with pytest.raises(RuntimeError, match="the last backward was in no_sync"):
        engine.step()


@pytest.mark.parametrize("make", ENGINES)
def test_what_cannot_be_trained_is_named(make):
    comm, x = FakeCommunicator(0, 2), torch.ones(2, WIDTH)
    sparse = make(Table(nn.Embedding(10, WIDTH, sparse=True)), comm, SGD)
    with pytest.raises(TypeError, match="the gradient of table.weight is torch.sparse_coo: expected a dense one"):
        sparse.backward(square(sparse, x))
    engine = make(model_of("frozen"), comm, SGD)
    engine.model[2].weight.requires_grad_()
    with pytest.raises(RuntimeError, match="2.weight requires a gradient now, and did not when the engine was made"):
        engine.backward(square(engine, x))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(engine)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("reshards", [True, False])
def test_a_forward_that_no_backward_follows_leaves_nothing_behind(reshards, trains):
    engine = Zero3(three_layers(), FakeCommunicator(0, 2), SGD, reshard_after_forward=reshards)
    x, ahead = torch.ones(2, WIDTH), []
    train(engine, 2)
    with contextlib.nullcontext() if trains else torch.no_grad():
        square(engine, x)
    assert engine.gathering.live() == 0 or trains
    engine.units[0].register_forward_hook(lambda *_: ahead.append(len(engine.gathering._in_flight)))
    engine.backward(square(engine, x))
    assert ahead[0] > 0 or not reshards and trains  # those are whole
    assert engine.gathering.live() == 0


class Waited(FakeCommunicator):
    """Counts handles that were waited for."""

    begun = waited = 0

    def _noted(self, collective, *args, async_op=False, **options):
        work = collective(*args, async_op=async_op, **options)
        if async_op:
            self.begun, wait = self.begun + 1, work.wait

            def waited():
                self.waited += 1
                return wait()
            work.wait = waited
        return work

    def all_reduce(self, *args, **options):
        return self._noted(super().all_reduce, *args, **options)

    def reduce_scatter(self, *args, **options):
        return self._noted(super().reduce_scatter, *args, **options)


@pytest.mark.parametrize("make", [DataParallel, Zero2, Zero3])
def test_a_backward_that_raises_waits_for_what_it_has_begun(make):
    comm = Waited(0, 2)
    engine = make(three_layers(), comm, SGD, bucket_bytes=500)
    engine.model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(square(engine, torch.ones(2, WIDTH)))
    assert comm.begun == comm.waited > 0
    assert engine.stage < 3 or engine.gathering.live() == 0
