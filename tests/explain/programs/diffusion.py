"""A model of noise: images at a random time, of which a small U-Net tells the noise."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.down = nn.Conv2d(3, width, 3, padding=1)
        self.inner = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x, t):
        wide = nn.functional.silu(self.down(x) + self.time(t[:, None])[:, :, None, None])
        deep = nn.functional.silu(self.inner(wide))
        return self.out(torch.cat([wide, self.up(deep)], dim=1))


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(5):
    images, t = torch.rand(16, 3, 32, 32), torch.rand(16)
    noise = torch.randn_like(images)
    share = torch.cos(t * 1.57)[:, None, None, None]
    loss = nn.functional.mse_loss(net(share * images + (1 - share**2).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
