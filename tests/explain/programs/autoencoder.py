"""A variational autoencoder: the loss is a sum over rows, of two terms."""

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(5):
    x = torch.rand(128, 784)
    mean, log_variance = encoder(x).chunk(2, dim=1)
    code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    likely = nn.functional.binary_cross_entropy(decoder(code), x, reduction="sum")
    apart = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    (likely + apart).backward()
    optimizer.step()
    optimizer.zero_grad()
