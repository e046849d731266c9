"""All shards together on rank 0, distributed again, and as weights for the plain model."""

import functools
import itertools
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from refimpl import memory
from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel, SavedStateError, Zero1, Zero2, Zero3

ENGINES = (DataParallel, Zero1, Zero2, Zero3)
CONFIG = GPTConfig(vocab_size=32, context_length=8, layers=2, hidden=16, heads=2)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def make(comm, stage, seed=0, dtype=None, **options):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT(CONFIG, dtype=dtype)
    model.register_buffer("seen", torch.tensor(seed))
    model.positions.requires_grad_(False)
    return ENGINES[stage](model, comm, ADAMW, **{"bucket_bytes": 4000, **options})


def train(engine, steps=2):
    for step in range(steps):
        x = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(step))
        x = x.chunk(engine.comm.world_size)[engine.comm.rank]
        engine.backward(engine.forward(x, x))
        engine.step()
    return engine


def differing(a, b):
    found = [key for key in ("class", "step", "param_groups") if a[key] != b[key]]
    found += [name for name in {**a["model"], **b["model"]} if not torch.equal(a["model"][name], b["model"][name])]
    return found + [(name, key) for name in {**a["optimizer"], **b["optimizer"]}
                    for key in {**a["optimizer"][name], **b["optimizer"][name]}
                    if not torch.equal(a["optimizer"][name][key], b["optimizer"][name][key])]


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


def given(comm):
    return [train(make(comm, stage)).state_dict() for stage in range(4)]


def taken(comm, given):
    """What is not as it was given, from each stage to each; and whether others than rank 0 hold anything."""
    found = []
    for stage, sd in itertools.product(range(4), given):
        engine = train(make(comm, stage, seed=7, bucket_bytes=2500), 1)
        engine.load_state_dict(sd if comm.rank == 0 else {})
        again = engine.state_dict()
        found.append(differing(again, sd) if comm.rank == 0 else again)
    return found


@pytest.mark.parametrize(("world_size", "other"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_stage_and_world_takes_what_any_other_gave(world_size, other):
    everything, *rest = launch(given, world_size)
    assert rest == [[{}] * 4] * (world_size - 1)
    first, *rest = launch(taken, other, everything)
    assert first == [[]] * 16 and rest == [[{}] * 16] * (other - 1)


def refusing(comm):
    engine, said = train(make(comm, 2)), []
    sd = engine.state_dict()
    wrong = [{}, {**sd, "class": "torch.optim.sgd.SGD"} if sd else {},
             {**sd, "model": {name: x for name, x in sd["model"].items() if name != "norm.weight"}} if sd else {},
             {**sd, "model": {**sd["model"], "seen": torch.zeros(2)}} if sd else {}]
    for each in wrong:
        with pytest.raises(SavedStateError) as error:
            engine.load_state_dict(each)
        said.append(str(error.value))
    again = engine.state_dict()
    return said, comm.rank or differing(sd, again)


def test_what_does_not_fit_is_refused_by_all():
    first, second = launch(refusing, 2)
    assert first[0] == second[0] and first[1] == []
    for said, expected in zip(first[0], ("has no 'model': expected what state_dict returned",
                                         "its optimizer is torch.optim.sgd.SGD, here torch.optim.adamw.AdamW",
                                         "norm.weight: absent, here (16,) float32",
                                         "seen: (2,) float32, not trained, here () int64, not trained"), strict=True):
        assert expected in said


# --- weights ---------------------------------------------------------------------------------------------------------


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
        path = tmp_path / f"{stage} {dtype} {to}"
        loaded = load_file(path)
        assert "head.weight" not in loaded and loaded.keys() | {"head.weight"} == held["model"].keys()
        for name, x in loaded.items():
            expected = held["model"][name]
            assert torch.equal(x, expected.to(to or dtype) if x.is_floating_point() else expected)
        plain = GPT(CONFIG, dtype=to or dtype)
        plain.register_buffer("seen", torch.tensor(0))
        assert plain.load_state_dict(loaded, strict=False) == (["head.weight"], [])
        load_model(plain, path)
        assert torch.equal(plain.head.weight, loaded["embedding.weight"])
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


class Wide(nn.Sequential):
    def __init__(self, layers):
        super().__init__(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))


@pytest.mark.parametrize("engine", [Zero1, Zero3])
def test_what_is_on_its_way_does_not_grow_with_the_model(tmp_path, engine):
    for layers in (4, 16):
        built = engine(Wide(layers), FakeCommunicator(1, 4), ADAMW, bucket_bytes=64 * 64 * 4)
        with memory.track(built.model, built.optimizer) as t:
            before = t.now.total
            built.save_weights(tmp_path / "weights")
            built.state_dict()
        assert t.peak.total - before <= 3 * 64 * 64 * 4 + 1100 * layers  # tensors, and a description of each


def full(comm, path):
    """Rank 0 cannot write the second time; the third it can."""
    engine, said, sync = train(make(comm, 3)), [], os.fsync
    engine.save_weights(path)
    before = path.read_bytes()
    for fails in (True, False):
        train(engine, 1)

        def failing(fd):
            raise OSError(28, "No space left on device")
        os.fsync = failing if fails else sync
        try:
            engine.save_weights(path)
        except (OSError, RankError) as error:
            said.append((type(error).__name__, str(error)))
        said.append(path.read_bytes() == before)
        comm.barrier()
    return said


def test_a_full_disk_leaves_the_file_that_was(tmp_path):
    first, second = launch(full, 2, tmp_path / "new" / "weights.safetensors")
    expected = f"[Errno 28] No space left on device: '{tmp_path / 'new' / 'weights.safetensors.tmp'}'"
    assert first == [("OSError", expected), True, False]
    assert second == [("RankError", f"rank 0 raised OSError: {expected}"), True, False]
    assert os.listdir(tmp_path / "new") == ["weights.safetensors"]  # and no temporary file


class WithNothing(torch.nn.Module):
    """A parameter without elements beside one that has some."""

    def __init__(self):
        super().__init__()
        self.some, self.nothing = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(0, 3))

    def forward(self, x):
        return (self.some * x).sum() + self.nothing.sum()


def saved_with_nothing(comm, make, directory):
    engine, norms = make(WithNothing(), comm), []
    engine.backward(engine.forward(torch.arange(5.0)))
    norms = [engine.clip_grad_norm_(1e9, norm_type).item() for norm_type in (1, 2, float("inf"))]
    engine.step()
    engine.save(directory)
    engine.load(directory)
    engine.load_state_dict(engine.state_dict())
    return norms


@pytest.mark.parametrize("make", ENGINES)
def test_a_parameter_without_elements_is_trained_clipped_and_saved(make, tmp_path):
    for norms in launch(saved_with_nothing, 2, make, tmp_path):
        assert norms == pytest.approx([10, 30**0.5, 4])
