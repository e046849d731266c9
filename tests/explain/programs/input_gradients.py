"""GNGAN-PyTorch#2: normalised gradients make images require one; each keeps its .grad, step after step."""

import torch
from torch import nn

torch.manual_seed(0)


def normalised(net, x):
    x.requires_grad_(True)
    f = net(x)
    (g,) = torch.autograd.grad(f, x, torch.ones_like(f), create_graph=True)
    return f / (g.flatten(1).norm(dim=1, keepdim=True) + f.abs())


def block(i, o, stride):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.LeakyReLU(0.2))


generator = nn.Sequential(block(3, 16, 1), nn.Conv2d(16, 3, 3, 1, 1), nn.Tanh())
critic = nn.Sequential(block(3, 16, 2), block(16, 32, 2), nn.Flatten(), nn.Linear(32 * 16 * 16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4)
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-4)
photos = [torch.rand(16, 3, 64, 64) for _ in range(30)]
sketches = [torch.rand(16, 3, 64, 64) for _ in range(30)]
for step in range(30):
    real, source = photos[step], sketches[step]
    fake = generator(source)
    opt_d.zero_grad()
    (normalised(critic, fake.detach()).mean() - normalised(critic, real).mean()).backward()
    opt_d.step()
    opt_g.zero_grad()
    (-critic(fake).mean() + (fake - real).abs().mean()).backward()
    opt_g.step()
