"""ema-pytorch#35: each checkpoint deep-copies the EMA wrapper (average + a reference cycle); copies pile up."""

import copy
import functools
import gc
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
gc.disable()  # as long runs do, to have no pauses


class Average(nn.Module):
    def __init__(self, online, beta=0.99):
        super().__init__()
        self.online = [online]  # hidden from state_dict
        self.shadow = copy.deepcopy(online).requires_grad_(False)
        self.beta = beta
        self.apply_update = functools.partial(self._lerp, weight=1 - beta)  # a cycle: self -> partial -> self

    @torch.no_grad()
    def _lerp(self, weight):
        for a, b in zip(self.shadow.parameters(), self.online[0].parameters(), strict=True):
            a.lerp_(b, weight)

    def checkpoint(self, folder, step):
        package = copy.deepcopy(self).to(torch.bfloat16).state_dict()
        torch.save(package, os.path.join(folder, f"{step}.pt"))


net = nn.Sequential(*(nn.Linear(768, 768) for _ in range(8)))
optimizer = torch.optim.AdamW(net.parameters())
average = Average(net)
with tempfile.TemporaryDirectory() as folder:
    for step in range(20):
        net(torch.randn(32, 768)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.apply_update()
        average.checkpoint(folder, step)
