"""Two views of each image, drawn together: the loss compares each row with all others."""

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(2048, 64),
)
optimizer = torch.optim.AdamW(encoder.parameters())
for _ in range(5):
    images = torch.rand(32, 3, 32, 32)
    views = [nn.functional.normalize(encoder(images + 0.1 * torch.randn_like(images)), dim=1) for _ in range(2)]
    likeness = views[0] @ views[1].T / 0.1
    nn.functional.cross_entropy(likeness, torch.arange(32)).backward()
    optimizer.step()
    optimizer.zero_grad()
