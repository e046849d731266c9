"""A mixture of experts by hand: tokens are sorted to their experts, sizes differ from step to step."""

import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self, width=64, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero().squeeze(1)
            out = out.index_add(0, rows, share[rows, None] * expert(x[rows]))
        return x + out


torch.manual_seed(0)
model = nn.Sequential(Mixture(), Mixture(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    x, y = torch.randn(1024, 64), torch.randint(10, (1024,))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
