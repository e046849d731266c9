"""A GAN: the critic steps five times for each step of the generator."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784))
critic = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)
for step in range(40):
    real, noise = torch.rand(64, 784), torch.randn(64, 32)
    of_critic.zero_grad()
    (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
    of_critic.step()
    if step % 5 == 0:
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
