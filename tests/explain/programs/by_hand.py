"""An optimizer written by hand: no step of torch.optim is made."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
momenta = [torch.zeros_like(p) for p in model.parameters()]
for _ in range(4):
    model(torch.randn(64, 128)).square().mean().backward()
    with torch.no_grad():
        for p, momentum in zip(model.parameters(), momenta, strict=True):
            momentum.mul_(0.9).add_(p.grad)
            p -= 0.01 * momentum
            p.grad = None
