"""A student follows a teacher whose weights are an average of its own, as in self-supervised training."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters())
centre = torch.zeros(256)
for _ in range(6):
    x = torch.randn(64, 768)
    with torch.no_grad():
        wanted = torch.softmax((teacher(x + 0.1 * torch.randn_like(x)) - centre) / 0.04, dim=1)
    said = torch.log_softmax(student(x) / 0.1, dim=1)
    loss = -(wanted * said).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.mul_(0.99).add_(fast, alpha=0.01)
        centre = 0.9 * centre + 0.1 * teacher(x).mean(0)
