"""Parameters that are not trained: in shards at stage 3, saved and loaded by any stage; and what `gathered` writes."""

import functools
from unittest import mock

import pytest
import torch
from rank_pool import on_ranks
from safetensors.torch import load_file
from torch import nn
from zero_kit import ENGINES, FAST, SGD, WIDTH, equal, fixed, parameters_of, rows_of, square
from zero_steps import STATES, train, update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import Zero3, sharded_parameters
from refimpl.zero.closed_forms import model_state_bytes, saved_bytes, step_traffic

RANK = 2  # of an adapter


class Adapted(nn.Module):
    """A frozen layer with trained factors beside it, as LoRA adds them, and a frozen mask of integers."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.mask = nn.Parameter(torch.tensor([1, 0] * (WIDTH // 2)), requires_grad=False)

    def forward(self, x):
        return self.base(x).tanh() + self.up(self.down(x)) * self.mask


class Model(nn.Module):
    """A frozen layer first, which no gradient reaches; then blocks, and a trained head."""

    def __init__(self, seed=0):
        super().__init__()
        fixed(seed)
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first.weight.data = self.first.weight.data.t()  # not contiguous
        self.blocks, self.head = nn.Sequential(*(Adapted() for _ in range(4))), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.blocks(self.first(x)))


def whole_frozen(comm, *args, **options):
    """The mutant: only what is trained is in shards."""
    with mock.patch.object(sharded_parameters, "frozen_buckets", lambda *args: []):
        return read(comm, *args, **options)


def read(comm, stage, **options):
    """(tracked model states, expected, sent in a step, expected)."""
    engine = train(ENGINES[stage](Model(), comm, FAST, **options), 2, rows=12)
    expected = model_state_bytes(Model(), comm.world_size, stage, rank=comm.rank, **options)
    before = comm.traffic
    with memory.track(engine.model, engine.optimizer) as t:
        train(engine, 1, rows=12)
        sent_by_step = comm.traffic - before
        engine.backward(square(engine, rows_of(comm, 0, rows=12)))
        now = {name: t.now[name] for name in STATES}
    sent = step_traffic(Model(), comm.world_size, stage, rank=comm.rank, **options)
    return now, dict(expected), dict(sent_by_step), dict(sent)


@pytest.mark.parametrize("options", [{}, {"persistence_threshold": 20}], ids=["all in shards", "small ones whole"])
def test_at_stage_3_frozen_parameters_are_in_shards_to_the_byte(options):
    whole = sum(p.nbytes for p in Model().parameters())
    for now, expected, sent, expected_sent in launch(functools.partial(read, **options), 4, 3):
        assert now == expected and sent == expected_sent
        assert options or now["parameters"] < 0.3 * whole
    for now, *_ in launch(functools.partial(whole_frozen, **options), 4, 3):
        assert now["parameters"] > 0.7 * whole


@pytest.mark.parametrize("stage", range(3))
def test_before_they_are_whole(stage):
    now, expected, sent, expected_sent = launch(read, 2, stage)[0]
    assert now == expected and sent == expected_sent


@on_ranks(2)
def test_every_stage_trains_alike(comm):
    found = [parameters_of(train(make(Model(), comm, FAST), 2, rows=12)) for make in ENGINES]
    for parameters in found:  # at stage 3 the first layer's weight is contiguous, and its product rounded
        torch.testing.assert_close(parameters, found[0], rtol=0, atol=1e-6)  # in another way


def saving(comm, folder, stage):
    """A model whose frozen parameters no other seed gives, and how large its files should be."""
    engine = train(ENGINES[stage](Model(seed=5), comm, FAST), 2, rows=12)
    engine.save(folder / "saved")
    engine.save_weights(folder / "weights", dtype=None)
    return parameters_of(engine), saved_bytes(Model(), comm.world_size, stage), engine.state_dict()


def loading(comm, folder, stage, sd, **options):
    loaded, given = (ENGINES[stage](Model(seed=1), comm, FAST, **(options if stage == 3 else {})) for _ in range(2))
    loaded.load(folder / "saved")
    given.load_state_dict(sd)
    return [parameters_of(each) for each in (loaded, given)] + [
        parameters_of(train(each, 1, rows=12)) for each in (loaded, given)]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_stage_on_any_number_of_ranks_loads_them(stage, world, tmp_path):
    expected, sizes, sd = launch(saving, 2, tmp_path, stage)[0]
    assert {path.name: path.stat().st_size for path in (tmp_path / "saved").glob("*/*")} == sizes
    assert equal(load_file(tmp_path / "weights"), expected)
    for other, options in ((0, {}), (1, {}), (3, {}), (3, {"persistence_threshold": 20})):
        for loaded, given, *after in launch(functools.partial(loading, **options), world, tmp_path, other, sd):
            assert equal(loaded, expected) and equal(given, expected) and equal(*after)
            assert not equal(after[0], expected)


def written(comm, stage, dtype, write):
    """Rank 0's values win; a step later they are what was trained."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7).requires_grad_(False)).to(dtype)
    engine = ENGINES[stage](model, comm, SGD)
    with engine.gathered(write=write), torch.no_grad():
        for p in model.parameters():
            p.fill_(0.0625 + comm.rank)
    before = parameters_of(engine)
    update(engine, square(engine, torch.ones(2, WIDTH, dtype=dtype)))
    return before, parameters_of(engine), {str(p.dtype) for p in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_written_is_kept_by_all_ranks(stage, dtype):
    for before, after, dtypes in launch(written, 2, stage, dtype, True):
        assert all((p == 0.0625).all() for p in before.values()) and dtypes == {str(dtype)}
        assert (after["0.weight"] != 0.0625).any() and (after["0.weight"] - 0.0625).abs().max() < 0.5
        assert (after["2.weight"] == 0.0625).all()


def test_without_write_it_is_lost_at_stage_3():
    before, *_ = launch(written, 2, 3, torch.float32, False)[0]
    assert all((p != 0.0625).any() for p in before.values())


def test_an_integer_is_in_shards_too():
    engine = Zero3(Model(), FakeCommunicator(0, 2), functools.partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(RuntimeError, match="mask is in shards"):
        engine.model.blocks[0].mask.sum()
    with engine.gathered():
        assert engine.model.blocks[0].mask.tolist() == [1, 0] * (WIDTH // 2)
