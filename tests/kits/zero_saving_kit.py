"""What the tests of ZeRO's saving share: models with all that a saved state has to hold, and what differs."""

import functools
import json
import re
import shutil

import pytest
import torch
from torch import nn
from zero_kit import ENGINES

from refimpl.comm import FakeCommunicator
from refimpl.saving import manifest
from refimpl.zero import SavedStateError

OPTIMIZERS = {"adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
              "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
WIDTH, ROWS = 10, 12


class Odd(nn.Module):
    """Tied weights, a frozen layer, buffers that are saved and not, a parameter of no dimensions, and dropout."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.three.requires_grad_(False)
        self.scale, self.dropout = nn.Parameter(torch.tensor(1.5)), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.three(self.two(self.dropout(self.one(x)).tanh()).tanh()) * self.scale


def build(seed=0, dtype=None):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Odd().to(dtype)


def two_groups(named):
    """Biases are not decayed, and learn faster."""
    return [{"params": [p for _, p in named if p.dim() == 2], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.dim() < 2], "lr": 0.03, "weight_decay": 0.0}]


def make(comm, stage, optimizer="adamw", seed=0, dtype=None, **options):
    return ENGINES[stage](build(seed, dtype), comm, OPTIMIZERS[optimizer], groups=two_groups,
                          **{"bucket_bytes": 500, **options})


def train(engine, steps, first=0):
    comm = engine.comm
    for step in range(first, first + steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to(next(engine.model.parameters()).dtype).chunk(comm.world_size)[comm.rank]
        engine.backward(engine.forward(x).square().mean())
        engine.step()
        engine.param_groups[0]["lr"] *= 0.9
    return engine


def differing(a, b):
    """Where two state_dicts are not equal to the bit; on a rank that has none, nothing."""
    if not (a and b):
        return []
    found = [key for key in ("class", "step", "param_groups") if a[key] != b[key]]
    found += [name for name in {**a["model"], **b["model"]} if not torch.equal(a["model"][name], b["model"][name])]
    for name in {**a["optimizer"], **b["optimizer"]}:
        ours, theirs = a["optimizer"][name], b["optimizer"][name]
        found += [(name, key) for key in {**ours, **theirs} if ours[key].dtype != theirs[key].dtype
                  or not torch.equal(ours[key], theirs[key])]
    return found


def alone(directory, stage=0, **options):
    """The state_dict of what one rank loads."""
    engine = make(FakeCommunicator(0, 1), stage, seed=7, **options)
    engine.load(directory)
    return engine.state_dict()


class Plain(nn.Module):
    """Nothing but a linear layer, so that a saved fp32 state fits a bf16 model: no buffers to be rounded."""

    def __init__(self, *shape):
        super().__init__()
        self.layer = nn.Linear(*shape, bias=False)

    def forward(self, x):
        return self.layer(x)


def plain(comm, stage, dtype=None, shape=(8, 8), seed=0, optimizer=torch.optim.Adam, make=ENGINES.__getitem__):
    torch.manual_seed(seed)
    engine = make(stage)(Plain(*shape).to(dtype), comm, optimizer, bucket_bytes=500)
    x = torch.ones(2, shape[0]).to(dtype)
    engine.backward(engine.forward(x).square().mean())
    engine.step()
    return engine


# --- damage ----------------------------------------------------------------------------------------------------------


def only(directory, pattern):
    """The one file of this name in the folder of the saved state."""
    path, = directory.glob(f"step-*/{pattern}")
    return path


def edited(change):
    def edit(directory):
        path = directory / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return edit


def rehash(content):
    content.pop("sha256")
    content["sha256"] = manifest._digest(content)


def rewritten(change):
    """The manifest changed, and its hash with it."""
    return edited(lambda content: (change(content), rehash(content)))


def refused(comm, folder, copies):
    """What each rank says to a damaged saved state, and whether its engine is as before."""
    said = {}
    for stage in (1, 3):
        engine = train(make(comm, stage, seed=7), 1)
        before = engine.state_dict()
        for name in copies:
            with pytest.raises(SavedStateError) as error:
                engine.load(folder / name)
            said[name] = str(error.value), differing(engine.state_dict(), before)
    return said


def check_damage(damages, whole, folder, launch):
    """All ranks name what is damaged, {name: (function of a copy's directory, what is said)}, and stay as they were."""
    for name, (damage, _) in damages.items():
        shutil.copytree(whole, folder / name)
        damage(folder / name)
    first, second = launch(refused, 2, folder, list(damages))
    for name, (_, expected) in damages.items():
        assert re.search(expected, first[name][0]), (name, first[name])
        assert first[name] == (second[name][0], []), name
        assert str(folder / name) in first[name][0], name
