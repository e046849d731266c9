"""an optimizer that steps once and is given up: `refimpl explain` (2 steps) never ends the script."""

import torch

net = torch.nn.Linear(64, 64)
warm = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(4, 64)).square().mean().backward()
warm.step()
warm.zero_grad()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(300):
    net(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("all 300 steps ran")
