"""A loop that keeps each loss with its graph, and measures accuracy on a held-out set every step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
losses, held_out = [], torch.randn(2048, 256)
for _ in range(5):
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    loss = nn.functional.cross_entropy(model(x), y)
    losses.append(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy = (model(held_out).argmax(1) == 0).float().mean()
