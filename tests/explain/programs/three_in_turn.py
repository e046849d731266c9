"""flashoptim#1: one optimizer "takes more" in a benchmark, since all models are made before any runs."""

import torch
from torch import nn

torch.manual_seed(0)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(4096, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def run(model, optimizer):
    for _ in range(5):
        model(torch.randn(16, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


a, b, c = build(), build(), build()
cases = {
    "sgd": (a, torch.optim.SGD(a.parameters(), lr=0.1)),
    "adamw": (b, torch.optim.AdamW(b.parameters())),
    "adamw_foreach": (c, torch.optim.AdamW(c.parameters(), foreach=True)),
}
for model, optimizer in cases.values():
    run(model, optimizer)
