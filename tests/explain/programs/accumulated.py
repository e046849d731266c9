"""Gradients of four micro-batches, clipped, with a scheduler: the loop that most tutorials print."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(512, 128), nn.Flatten(), nn.Linear(32 * 128, 512), nn.GELU(), nn.Linear(512, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
loss_function = nn.CrossEntropyLoss()
accumulation = 4
for batch in range(40):
    tokens, targets = torch.randint(512, (16, 32)), torch.randint(512, (16,))
    loss = loss_function(model(tokens), targets) / accumulation
    loss.backward()
    if (batch + 1) % accumulation == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
