"""All shards together on rank 0, distributed again, and as weights for the plain model."""

import functools
import itertools
import os

import pytest
import torch
from rank_pool import on_ranks
from refused_kit import check_state_dicts_that_do_not_fit, check_weights, check_weights_on_a_full_disk
from saving_kit import differing
from torch import nn
from zero_kit import ENGINES, fixed
from zero_steps import above, stack, update

from refimpl.comm import FakeCommunicator, launch
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero1, Zero3

CONFIG = GPTConfig(vocab_size=32, context_length=8, layers=2, hidden=16, heads=2)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def make(comm, stage=2, seed=0, dtype=None, **options):
    fixed(seed)
    model = GPT(CONFIG, dtype=dtype)
    model.register_buffer("seen", torch.tensor(seed))
    model.positions.requires_grad_(False)
    return ENGINES[stage](model, comm, ADAMW, **{"bucket_bytes": 4000, **options})


def train(engine, steps=2):
    for step in range(steps):
        x = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(step))
        x = x.chunk(engine.comm.world_size)[engine.comm.rank]
        update(engine, engine.forward(x, x))
    return engine


def test_it_is_what_the_model_and_the_optimizer_say():
    engine = train(make(FakeCommunicator(0, 1), 0))
    sd, model, optimizer = engine.state_dict(), engine.model.state_dict(), engine.optimizer.state_dict()
    assert sd["model"].keys() == model.keys()
    assert all(torch.equal(sd["model"][name], x) for name, x in model.items())
    assert sd["model"]["head.weight"] is sd["model"]["embedding.weight"]  # tied: no bytes twice
    for i, name in enumerate(sd["param_groups"][0]["params"]):
        for key, x in optimizer["state"][i].items():
            assert torch.equal(sd["optimizer"][name][key], x) and sd["optimizer"][name][key].dtype == x.dtype
    ours, theirs = ({**each["param_groups"][0], "params": None} for each in (sd, optimizer))
    assert ours == theirs and sd["step"] == 2


@pytest.mark.parametrize(("world_size", "other"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_stage_and_world_takes_what_any_other_gave(world_size, other):
    def taken(comm, given):
        """From each stage to each it is as it was given, and others than rank 0 hold nothing."""
        for stage, sd in itertools.product(range(4), given):
            engine = train(make(comm, stage, seed=7, bucket_bytes=2500), 1)
            engine.load_state_dict(sd if comm.rank == 0 else {})
            again = engine.state_dict()
            assert (again == {}) if comm.rank else (again and differing(again, sd) == [])

    everything, *rest = launch(lambda comm: [train(make(comm, stage)).state_dict() for stage in range(4)], world_size)
    assert rest == [[{}] * 4] * (world_size - 1)
    launch(taken, other, everything)


def test_what_does_not_fit_is_refused_by_all():
    check_state_dicts_that_do_not_fit((make, train), "(16,)")


def weights(comm, folder):
    """Files by (stage, dtype of the model, dtype asked for), and the parameters that they are of."""
    found = {}
    for stage, dtype in itertools.product(range(4), (torch.float32, torch.bfloat16)):
        engine = train(make(comm, stage, dtype=dtype))
        held = engine.state_dict()
        for to in (torch.bfloat16, torch.float32, None):
            engine.save_weights(folder / f"{stage} {dtype} {to}", to)
            found[stage, dtype, to] = held
    return found


def test_weights_for_the_plain_model(tmp_path):
    found, *_ = launch(weights, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == len(found)  # and no temporary file
    for (stage, dtype, to), held in found.items():
        plain = GPT(CONFIG, dtype=to or dtype)
        plain.register_buffer("seen", torch.tensor(0))
        check_weights(tmp_path / f"{stage} {dtype} {to}", held["model"], plain, "head.weight", "embedding.weight")


@pytest.mark.parametrize("engine", [Zero1, Zero3])
def test_what_is_on_its_way_does_not_grow_with_the_model(tmp_path, engine):
    for layers in (4, 16):
        built = engine(stack(layers), FakeCommunicator(1, 4), ADAMW, bucket_bytes=64 * 64 * 4)
        for work, *given in ((built.save_weights, tmp_path / "weights"), (built.state_dict,)):
            found = above(built.model, built.optimizer, work, *given)
            assert found <= 3 * 64 * 64 * 4 + 1100 * layers  # tensors, and a description of each


def test_a_full_disk_leaves_the_file_that_was(tmp_path):
    check_weights_on_a_full_disk((functools.partial(make, stage=3), train), tmp_path / "new")


class WithNothing(nn.Module):
    """A parameter without elements beside one that has some."""

    def __init__(self):
        super().__init__()
        self.some, self.nothing = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(0, 3))

    def forward(self, x):
        return (self.some * x).sum() + self.nothing.sum()


@pytest.mark.parametrize("make", ENGINES)
@on_ranks(2)
def test_a_parameter_without_elements_is_trained_clipped_and_saved(comm, make, tmp_path):
    engine = make(WithNothing(), comm)
    engine.backward(engine.forward(torch.arange(5.0)))
    norms = [engine.clip_grad_norm_(1e9, norm_type).item() for norm_type in (1, 2, float("inf"))]
    assert norms == pytest.approx([10, 30**0.5, 4])
    engine.step()
    engine.save(tmp_path)
    engine.load(tmp_path)
    engine.load_state_dict(engine.state_dict())
