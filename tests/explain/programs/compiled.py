"""pytorch#120381: checkpointed layers, compiled, take more at the peak than in eager mode."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


model = nn.Sequential(*(Layer() for _ in range(5)))
run = model if "eager" in sys.argv else torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(10):
    run(torch.randn(4096, 256, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
