"""A model on the meta device gets its values unit by unit: at its peak the start takes all shards and one unit."""

import contextlib
import functools
import json
import types
from dataclasses import replace

import pytest
import torch
from families import LLAMA
from rank_pool import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from zero_kit import CONFIG, ENGINES, FAST, copied, equal, fixed, gpt, own_rows, parameters_of, token_batches
from zero_steps import most, stack, update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.model import GPT, GPTConfig
from refimpl.rotary import rotation_table
from refimpl.zero import Zero3
from refimpl.zero import engine as engines
from refimpl.zero.closed_forms import start_bytes
from refimpl.zero.internals import initializers

LARGER = GPTConfig(vocab_size=64, context_length=16, layers=6, hidden=64, heads=4)


def on_meta(config=CONFIG, **options):
    fixed()
    return GPT(config, device="meta", **options)


class Frozen(nn.Module):
    """Frozen layers beside trained ones, buffers, and a small parameter that is in no unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.BatchNorm1d(64),
                                                  nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def peak_of(make, comm, **options):
    with memory.track() as t:
        Zero3(make(), comm, FAST, **options)
    return most(t, *{"parameters", "optimizer state", "buffers"} & set(t.timeline.categories))


def made_on_meta(make):
    with torch.device("meta"):
        return make()


MODELS = {
    "GPT": (functools.partial(on_meta, LARGER), {}),
    "GPT, bf16": (functools.partial(on_meta, LARGER, dtype=torch.bfloat16), {}),
    "as LLaMA": (functools.partial(on_meta, replace(LARGER, **LLAMA)), {}),
    "as LLaMA, bf16": (functools.partial(on_meta, replace(LARGER, **LLAMA), dtype=torch.bfloat16), {}),
    "GPT, some whole": (functools.partial(on_meta, LARGER), {"persistence_threshold": 100}),
    "frozen layers": (functools.partial(made_on_meta, Frozen), {})}


@pytest.mark.parametrize("name", MODELS)
def test_the_start_takes_all_shards_and_one_unit(name):
    make, options = MODELS[name]
    expected, model = start_bytes(make(), 8, **options), make()
    initialize = {"initialize": model.initialize} if isinstance(model, GPT) else {}
    assert peak_of(make, FakeCommunicator(3, 8), **options, **initialize) == expected
    assert expected < 0.5 * sum(p.nbytes for p in model.parameters())


def test_a_start_that_makes_all_of_it_first_takes_more():
    """The mutant: the model is one unit."""
    model = on_meta(LARGER)
    peak = peak_of(lambda: model, FakeCommunicator(3, 8), units=[model], initialize=model.initialize)
    assert peak > 1.1 * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [32, 256])  # a dry run keeps values of up to 64 KB: of all, or of norms alone
def test_a_dry_run_takes_the_same(hidden, dtype):
    make = functools.partial(on_meta, replace(LARGER, hidden=hidden, vocab_size=512, **LLAMA), dtype=dtype)
    def begin():
        model = make()
        Zero3(model, FakeCommunicator(0, 2), FAST, initialize=model.initialize)

    assert memory.dry_run(begin).peak.total == start_bytes(make(), 2)


def test_the_allocator_reads_no_more(monkeypatch):
    """Without the trial of the optimizer, which takes 4 MB for a moment, however large the model is."""
    monkeypatch.setattr(engines, "check_elementwise", lambda *given: None)
    comm, model = FakeCommunicator(3, 8), on_meta(LARGER)
    with memory.measure("cpu") as m:
        Zero3(model, comm, FAST, initialize=model.initialize)
    assert 0 <= m.peak - start_bytes(on_meta(LARGER), 8) < 4096


def initialized(comm):
    engine = Zero3(on_meta(), comm, FAST, initialize=on_meta().initialize)
    first = parameters_of(engine)
    for (tokens,) in token_batches(2):
        mine = own_rows(comm, tokens)
        loss = engine(mine, mine)
        update(engine, loss)
    return first, loss.item()


def test_a_function_initializes_all_ranks_alike_and_they_train():
    (first, loss), (second, other) = launch(initialized, 2)
    assert equal(first, second) and 3.5 < loss < 4.5 and 3.5 < other < 4.5
    spread = {name: p.std().item() for name, p in first.items() if p.dim() == 2}
    expected = {name: p.std().item() for name, p in gpt().named_parameters() if p.dim() == 2}
    assert spread == pytest.approx(expected, rel=0.1)
    assert all((p == (1 if name.endswith("weight") else 0)).all() for name, p in first.items() if p.dim() == 1)


def seeded(model):
    """`model.initialize`, for which each module has random numbers of its own, whatever was initialized before."""
    numbers = {module: i for i, module in enumerate(model.modules())}
    def initialize(module):
        torch.manual_seed(numbers[module])
        model.initialize(module)
    return initialize


class WithTables(GPT):
    """A rotary model that has tables of its context, which are saved with no state."""
    def initialize(self, module):
        super().initialize(module)
        if module is self:
            for buffer, table in zip((self.cos, self.sin), rotation_table(self.config), strict=True):
                buffer.copy_(table)


def with_tables(model, device):
    model.__class__ = WithTables
    for name in ("cos", "sin"):
        model.register_buffer(name, torch.empty(rotation_table(model.config)[0].shape, device=device), persistent=False)
    return model


@on_ranks(2)
def test_a_rotary_model_starts_as_it_is_built(comm):
    config = replace(CONFIG, **LLAMA)
    built, model = with_tables(gpt(config), "cpu"), with_tables(on_meta(config), "meta")
    built.apply(seeded(built))
    engine, expected = Zero3(model, comm, FAST, initialize=seeded(model)), dict(built.named_buffers())
    assert equal(parameters_of(engine), copied(built))
    assert equal(dict(model.named_buffers()), expected) and set(expected) == {"cos", "sin"}
    assert engine(own_rows(comm, token_batches(1)[0, 0])).isfinite().all()


def from_file(comm, path, stage):
    """The saved weights are the same in models on the meta device and in one that loads them by torch."""
    model = Frozen()
    model.load_state_dict(load_file(path / "weights.safetensors"))
    engines = [Zero3(made_on_meta(Frozen), comm, FAST, initialize=path / "weights.safetensors"),
               Zero3(made_on_meta(Frozen), comm, FAST, initialize=path / "model.safetensors.index.json",
                     persistence_threshold=5000), ENGINES[stage](model, comm, FAST)]
    for each in [parameters_of(e) for e in engines], [dict(e.model.named_buffers()) for e in engines]:
        assert equal(each[0], each[2]) and equal(each[1], each[2])
    assert len({engine(torch.ones(4, 64)).sum().item() for engine in engines}) == 1


def test_a_file_or_several_give_the_same_model(tmp_path):
    torch.manual_seed(3)
    model = Frozen()
    model(torch.randn(8, 64))  # running statistics
    state = model.state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    halves = {"one.safetensors": dict(list(state.items())[::2]), "two.safetensors": dict(list(state.items())[1::2])}
    for file, part in halves.items():
        save_file(part, tmp_path / file)
    index = {name: file for file, part in halves.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    launch(from_file, 3, tmp_path, 3)


def test_a_rank_reads_its_rows_alone(tmp_path, monkeypatch):
    save_file({f"{i}.weight": torch.randn(64, 64) for i in range(4)}, tmp_path / "w")
    read, opened = [], initializers.safe_open

    class Slice:
        def __init__(self, whole):
            self.whole, self.get_shape = whole, whole.get_shape

        def __getitem__(self, rows):
            read.append(self.whole[rows].numel())
            return self.whole[rows]

    @contextlib.contextmanager
    def counting(*args, **options):
        with opened(*args, **options) as file:
            yield types.SimpleNamespace(keys=file.keys, get_slice=lambda name: Slice(file.get_slice(name)))

    monkeypatch.setattr(initializers, "safe_open", counting)
    Zero3(made_on_meta(lambda: stack(4)), FakeCommunicator(1, 8), FAST, initialize=str(tmp_path / "w"))
    assert sum(read) == 4 * 64 * 64 // 8


def with_values(device):
    """Layers of which some parameters have values already."""
    model = nn.Sequential(nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device))
    model[0].bias = nn.Parameter(torch.full((8,), 7.0))
    return model


def test_what_has_values_already_keeps_them(tmp_path):
    def started(comm):
        return [parameters_of(Zero3(with_values("meta"), comm, FAST, initialize=each))
                for each in (tmp_path / "file", None)]

    state = with_values("cpu").state_dict()
    save_file(state, tmp_path / "file")
    for read, made in launch(started, 2):
        assert equal(read, state) and (made["0.bias"] == 7).all() and not equal(made, state)


class Bare(nn.Module):
    """Without a way to initialize it."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale


def partly(module):
    """Writes parameters, and no buffers."""
    for p in module.parameters(recurse=False):
        nn.init.ones_(p)


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


def greedily(module):
    if isinstance(module, Greedy):
        nn.init.ones_(module.one.weight)


def test_what_gets_no_values_is_named(tmp_path):
    def refused(make, initialize, match):
        with pytest.raises(ValueError, match=match):
            Zero3(make(), FakeCommunicator(0, 2), FAST, initialize=initialize)
    meta = functools.partial(made_on_meta, Bare)
    layer = functools.partial(made_on_meta, lambda: nn.Sequential(nn.Linear(4, 4)))
    refused(meta, None, r"scale has no values after reset_parameters\(\) of its Bare: pass as initialize= a function")
    refused(meta, partly, r"table has no values after reset_parameters\(\) and partly\(\) of its Bare")
    refused(functools.partial(made_on_meta, Greedy), greedily, r"greedily\(\) writes for the model, Greedy, to")
    refused(Bare, partly, "no parameter or buffer of the model is on the meta device")
    save_file({"0.weight": torch.ones(4, 4), "step": torch.ones(1)}, tmp_path / "lacks")
    refused(layer, tmp_path / "lacks", "0.bias is not in .*lacks, which has 2 tensors, such as 0.weight")
    state = {"scale": torch.ones(4), "layer.weight": torch.ones(4, 4), "layer.bias": torch.ones(4)}
    save_file({**state, "scale": torch.ones(5)}, tmp_path / "other")
    refused(meta, tmp_path / "other", r"scale has shape \(5,\) in .*other: expected \(4,\)")
    save_file(state, tmp_path / "all")
    refused(meta, tmp_path / "all", "table is a buffer on the meta device that no file has")


@pytest.mark.parametrize("make", ENGINES[:3])
def test_the_other_stages_name_the_one_that_can(make):
    with pytest.raises(ValueError, match="embedding.weight is on the meta device: Zero3 gives such a model its values"):
        make(on_meta(), FakeCommunicator(0, 2), FAST)
