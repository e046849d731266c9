"""prime-rl#2154: after resume the loaded state stays alive beside the optimizer's own copy: the first step runs out."""

import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)


def build():
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    return net, torch.optim.AdamW(net.parameters())


def write(path):
    net, optimizer = build()
    net(torch.randn(8, 1024)).sum().backward()
    optimizer.step()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        write(path)
        net, optimizer = build()
        loaded = torch.load(path)
    net.load_state_dict(loaded["net"])
    optimizer.load_state_dict(loaded["optimizer"])
    for state in optimizer.state.values():  # "offload": the optimizer has copies of its own now
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].clone()
    for _ in range(20):
        net(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
