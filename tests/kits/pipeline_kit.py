"""What tests of pipelines share: models that are cut in stages, and their gradients."""

import copy

import torch
from torch import nn

from refimpl.pipeline.executor import PipelineParallelStage
from refimpl.pipeline.named_schedules import schedule as schedule_of

WIDTH, ROWS = 16, 18


def mlp():
    """Return a stage of which each tensor that it keeps is known."""
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down).double()


def sequential(stages, dtype=torch.float64):
    """Return a plain model, one module for each stage."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
                           for _ in range(stages))).to(dtype)


def batch(dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, rows, 3, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def distances(comm, name, m, dtype=torch.float64, steps=2):
    """Train a few steps; return the largest differences of losses and of gradients from the unsplit model."""
    schedule = schedule_of(name, comm.world_size, m)
    model = sequential(schedule.stages, dtype)
    whole = copy.deepcopy(model)
    pipe = PipelineParallelStage({s: model[s] for s in schedule.stages_of(comm.rank)}, comm, schedule,
                                 loss=nn.functional.mse_loss)
    found = [0.0]
    for step in range(steps):
        x, target = batch(dtype, ROWS - step)
        model.zero_grad(), whole.zero_grad()
        loss = nn.functional.mse_loss(whole(x), target)
        loss.backward()
        mine = pipe.train_step(x, target)
        if schedule.stages - 1 in pipe.stages:
            found.append((mine - loss).abs().item())
        for s in pipe.stages:
            for ours, theirs in zip(model[s].parameters(), whole[s].parameters(), strict=True):
                found.append(((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
    return max(found)
