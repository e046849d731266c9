"""A U-net in small, in bfloat16 where autocast says so, with skips and batch norm."""

import torch
from torch import nn

torch.manual_seed(0)


def block(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.SiLU()
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = block(3, 16), block(16, 32), block(48, 16)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        whole = self.down(x)
        half = self.middle(nn.functional.max_pool2d(whole, 2))
        return self.out(self.up(torch.cat([whole, nn.functional.interpolate(half, scale_factor=2)], 1)))


net = Net()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    images = torch.rand(8, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (net(images + 0.1 * torch.randn_like(images)) - images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
