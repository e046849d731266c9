"""dlrm#15: Adagrad takes dense gradients, so that each embedding table gets a whole one for a few rows."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
SPARSE = "sparse" in sys.argv


class Clicks(nn.Module):
    def __init__(self, rows=200_000, width=16, tables=3):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=SPARSE) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        return self.top(torch.cat([t(i) for t, i in zip(self.tables, ids, strict=True)], 1))


model = Clicks()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
for _ in range(20):
    ids = torch.randint(200_000, (3, 128, 4))
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], torch.rand(128))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
