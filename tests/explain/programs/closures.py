"""Steps that are given a closure, as L-BFGS needs and Lightning does for every optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
x = torch.randn(128, 64)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return loss


for _ in range(5):
    optimizer.step(closure)
