"""torchinfo#144: a summary says 130 MB for a layer that is applied a hundred times; the run takes 4 GB."""

import torch
from torch import nn


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        for _ in range(100):
            x = self.linear(x)
        return x


def build():
    return Again(), {"x": torch.zeros(1024, 256)}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Again()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(10):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
