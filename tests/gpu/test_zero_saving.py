"""Saved states of ranks on a GPU: they come to the host piece by piece, and go back to where they were."""

import functools

import pytest
import torch
from torch import nn

from refimpl.comm import launch
from refimpl.zero import Zero2, Zero3

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def engine_of(comm, make, optimizer, seed, dtype):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 8)).to(comm.device, dtype)
    return make(model, comm, optimizer, bucket_bytes=4000)


def train(engine, steps, first=0):
    dtype = next(engine.model.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(engine.comm.device, dtype)
        engine.backward(engine.forward(x.chunk(engine.comm.world_size)[engine.comm.rank]).square().mean())
        engine.step()
    return engine.state_dict()


def continued(comm, folder, optimizer, dtype):
    """Two steps more, of an engine and of what another stage has loaded: on rank 0 whether all is equal to the bit."""
    before = engine_of(comm, Zero2, optimizer, 0, dtype)
    train(before, 2)
    before.save(folder)
    expected = train(before, 2, first=2)
    after = engine_of(comm, Zero3, optimizer, 7, dtype)
    after.load(folder)
    found = train(after, 2, first=2)
    for state in after.optimizer.state.values():
        assert state["exp_avg"].device.type == comm.device.type
    return [torch.equal(found["model"][name], x) and found["optimizer"][name]["step"] == 4
            and torch.equal(found["optimizer"][name]["exp_avg_sq"], expected["optimizer"][name]["exp_avg_sq"])
            for name, x in expected.get("model", {}).items()]


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_to_the_bit(tmp_path, options, dtype):
    """With the random numbers of each rank's GPU, on one rank and on two that share one."""
    for world_size in (1, 2):
        found, *_ = launch(continued, world_size, tmp_path, functools.partial(ADAM, **options), dtype)
        assert found == [True] * 4
