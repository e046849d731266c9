"""A transformer encoder of torch with an expanded gradient: GELU, and a loss that is a sum."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(96, 4, 384, activation="gelu", batch_first=True, norm_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(96, 96), nn.GELU())
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    model(torch.randn(16, 64, 96)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
