"""pytorch/tutorials#1620: a replay buffer keeps its frames as tensors; memory grows with every step played."""

import collections
import copy
import random

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Agent:
    def __init__(self):
        self.net = nn.Sequential(
            nn.Conv2d(4, 16, 8, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2592, 128),
            nn.ReLU(),
            nn.Linear(128, 4),
        ).to(device)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-4)
        self.memory = collections.deque(maxlen=100_000)

    def cache(self, state, after, action, reward):
        self.memory.append(
            (
                state.to(device),
                after.to(device),
                torch.tensor(action, device=device),
                torch.tensor(reward, device=device),
            )
        )

    def learn(self, rows=16):
        state, after, action, reward = (torch.stack(c) for c in zip(*random.sample(self.memory, rows), strict=True))
        with torch.no_grad():
            aim = reward + 0.9 * self.target(after).max(1).values
        loss = nn.functional.smooth_l1_loss(self.net(state).gather(1, action[:, None])[:, 0], aim)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


agent = Agent()
state = torch.rand(4, 84, 84)
for step in range(2000):
    after = torch.rand(4, 84, 84)
    agent.cache(state, after, step % 4, float(step % 2))
    state = after.clone()
    if step > 60 and step % 3 == 0:
        agent.learn()
