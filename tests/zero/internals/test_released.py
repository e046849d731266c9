"""Parameters in shards that someone reads outside of their unit, by whatever way: served, or named; never NaN."""

import contextlib
import gc

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero_kit import FAST, SGD, WIDTH, batch, equal, farthest, fixed, own_rows, parameters_of
from zero_steps import tracked

from refimpl.comm import FakeCommunicator, simulate
from refimpl.zero import DataParallel, Zero3
from refimpl.zero.internals.released import Released

ROWS = 12  # tokens


class Stack(nn.Module):
    """A table, layers, and a reader of the table's weight."""

    def __init__(self, frozen=False):
        super().__init__()
        self.table, self.norm = nn.Embedding(ROWS, WIDTH).requires_grad_(not frozen), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.table(self.ids(x))
        for layer in self.layers:
            h = layer(h).tanh()
        return self.score(self.norm(h))

    def ids(self, x):
        return (x[:, 1:4] * 3).long().abs() % ROWS

    def score(self, h):
        return F.linear(h, self.table.weight)


class Penalty(Stack):
    def score(self, h):
        return super().score(h) + sum(p.square().mean() for p in self.parameters())


class Never(Stack):
    """Nobody calls the table."""
    def forward(self, x):
        return self.score(self.norm(self.layers[0](F.embedding(self.ids(x), self.table.weight)).tanh()))


class Early(Stack):
    """The norm's weight is read before the norm is called, and after it."""
    def forward(self, x):
        h = self.layers[0](x * self.norm.weight).tanh()
        return self.score(self.norm(self.layers[2](self.layers[1](h)))) * self.norm.weight.mean()


class Closure(Stack):
    def __init__(self):
        super().__init__()
        weight = self.layers[1].weight
        self.read = lambda: weight

    def score(self, h):
        return h @ self.read().T


class Functional(Stack):
    def score(self, h):
        return functional_call(self.layers[0], {"weight": self.layers[2].weight * 2}, (h,))


class Recomputed(Stack):
    def score(self, h):
        return checkpoint(super().score, h, use_reentrant=False)


class Tied(Stack):
    """Nothing reads it outside: what is served has to be no more than needed."""
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def score(self, h):
        return self.head(h) + h.new_zeros(self.table.weight.shape[0], dtype=self.table.weight.dtype)


MODELS = {"tied": Stack, "frozen": lambda: Stack(True), "penalty": Penalty, "never called": Never, "early": Early,
          "closure": Closure, "functional": Functional, "recomputed": Recomputed,
          "head": Tied}


def made(name):
    fixed()
    return MODELS[name]()


def train(engine, steps=3):
    for step in range(steps):
        with torch.no_grad():
            engine(batch(step, rows=6))
        for micro_batch in (0, 1):
            x = own_rows(engine.comm, batch(step + 5 * micro_batch, rows=6))
            engine.backward(engine(x).square().mean())
        engine.step()
    return engine


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"look_ahead": 0}], ids=str)
@on_ranks("world_size")
def test_it_trains_as_data_parallelism_does(comm, world_size, name, options):
    """To the bit on one rank; on several, sums of two micro-batches are in another order."""
    engine = Zero3(made(name), comm, SGD, **options)
    plain, ours = (parameters_of(train(each)) for each in (DataParallel(made(name), comm, SGD), engine))
    assert all(p.isfinite().all() for p in plain.values())
    assert equal(plain, ours) if world_size == 1 else farthest(plain, ours) < 1e-5
    assert engine.gathering.live() == 0 and not engine.gathering.kept_for_outside
    assert all(isinstance(p, Released) for p in engine.model.parameters())


SIZES = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 32}
OTHERS = {  # model: (class, options, what is read outside of its unit)
    "deberta-v2": ("AutoModelForMaskedLM", {
        **SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {"deberta.encoder.rel_embeddings.weight"}),
    "prophetnet": ("AutoModelForSeq2SeqLM", {
        **SIZES, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0},
        {"prophetnet.decoder.ngram_embeddings.weight", "prophetnet.decoder.position_embeddings.weight"})}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", OTHERS)
@on_ranks("world_size")
def test_models_that_read_a_table_which_they_do_not_call(comm, world_size, kind):
    transformers = pytest.importorskip("transformers")
    name, options, read = OTHERS[kind]
    found = []
    for make in (DataParallel, Zero3):
        fixed()
        engine = make(getattr(transformers, name).from_config(transformers.AutoConfig.for_model(kind, **options)), comm,
                      SGD)
        for step in range(3):
            tokens = torch.randint(2, 60, (6, 12), generator=torch.Generator().manual_seed(step))
            mine = own_rows(comm, tokens)
            engine.backward(engine(input_ids=mine, labels=mine).loss)
            engine.step()
        found.append(parameters_of(engine))
    assert equal(*found) if world_size == 1 else farthest(*found) < 1e-6
    assert {bucket.name for bucket in engine.gathering.outside} == read


def test_what_is_read_stays_from_its_first_use_to_the_end_and_nothing_else_does():
    sizes = {}
    for name in ("tied", "head"):
        engine = Zero3(made(name), FakeCommunicator(0, 2), FAST, look_ahead=0)
        seen = []
        engine.model.layers[1].register_forward_hook(
            lambda *_, e=engine, s=seen: s.append(e.model.table.weight.untyped_storage().nbytes() > 4))
        tracked(engine, batch(0), steps=3)
        sizes[name] = seen
        assert {bucket.name for bucket in engine.gathering.outside} == ({"table.weight"} if name == "tied" else set())
    assert sizes == {"tied": [False, True, True], "head": [False] * 3}  # shapes and dtypes are told without


class Unserved(Zero3):
    """The mutant: a reader gets what is there."""
    def _make_parameters(self):
        super()._make_parameters()
        self.gathering.read = lambda name: None


def test_unserved_a_reader_is_refused_and_without_that_it_would_train_on_nan(monkeypatch):
    with pytest.raises(RuntimeError, match="reads a parameter in shards.* such as table.weight"):
        train(Unserved(made("tied"), FakeCommunicator(0, 1), FAST), 1)
    monkeypatch.setattr(Zero3, "_unread", lambda self: contextlib.nullcontext())
    engine = train(Unserved(made("tied"), FakeCommunicator(0, 1), FAST), 1)
    assert any(p.isnan().any() for p in parameters_of(engine).values())


def test_an_engine_that_is_gone_is_said():
    model = made("tied")
    Zero3(model, FakeCommunicator(0, 1), FAST)
    gc.collect()
    with pytest.raises(RuntimeError, match="table.weight (was|is) in shards"):
        model.table.weight.sum()


@pytest.mark.parametrize("write", [lambda p: p.zero_(), lambda p: p.data.zero_(), lambda p: p.copy_(torch.ones(3)),
                                   lambda p: setattr(p, "data", torch.ones(ROWS, WIDTH)), nn.init.zeros_])
def test_what_is_written_between_steps_is_refused_by_name(write):
    engine = train(Zero3(made("tied"), FakeCommunicator(0, 1), FAST), 1)
    before = parameters_of(engine)
    with pytest.raises(RuntimeError, match="^table.weight is in shards, and is read or written outside"):
        write(engine.model.table.weight)
    assert equal(before, parameters_of(engine))


UNSEEN = {
    "vmap": lambda w: torch.func.vmap(lambda row: row.clamp(min=0).sum())(w).sum(),
    "grad": lambda w: torch.func.grad(lambda w: w.clamp(min=0).square().sum())(w).sum(),
    "torch.tensor": lambda w: (torch.tensor(w) > 0).sum()}


class Reads(Stack):
    """A read of a layer's weight, before the layer is called, for which torch calls no `__torch_function__`."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return super().forward(x) * self.read(self.layers[1].weight)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_function_of_torch_sees_is_refused_in_the_first_step(name, world_size):
    def step(comm, read):
        engine = Zero3(Reads(read), comm, SGD)
        before = parameters_of(engine)
        try:
            engine.backward(engine(own_rows(comm, batch(0, rows=6))).sum())
        except RuntimeError as error:
            assert "layers.1.weight" in str(error) and "reads a parameter in shards" in str(error)
            return equal(parameters_of(engine), before)
        return "nothing was said"

    assert simulate(step, world_size, UNSEEN[name]) == [True] * world_size
    assert simulate(step, world_size, lambda w: UNSEEN[name](w.clone())) == ["nothing was said"] * world_size
