"""Optimizers that do not treat each element by itself for long, or keep what cannot be cut into pieces."""

import torch


class InBlocks(torch.optim.SGD):
    """Momentum in 8 bits by torchao's rule: of tensors of `least` elements and more that fill blocks, each with a
    scale."""

    def __init__(self, params, lr=0.1, block=256, least=4096):
        super().__init__(params, lr=lr)
        self.block, self.least = block, least

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].get("momentum", torch.zeros_like(p)) * 0.9 + p.grad
            p.data.sub_(momentum, alpha=0.1)
            if p.numel() >= self.least and p.numel() % self.block == 0:
                blocks = momentum.view(-1, self.block)
                scale = blocks.abs().amax(1, keepdim=True) / 127
                momentum = ((blocks / scale).round() * scale).view_as(p)
            self.state[p]["momentum"] = momentum


class Codes(torch.Tensor):
    """A tensor that is more than its elements."""


class Keeping(torch.optim.SGD):
    """SGD that keeps `kept(p)` of each parameter."""

    def __init__(self, params, lr=0.1, kept=None):
        super().__init__(params, lr=lr)
        self.kept = kept

    def step(self):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["kept"] = self.kept(p.detach())


class Late(torch.optim.SGD):
    """From step `begin` on, counted in `state` or in a param group, gradients are divided by their tensor's norm; or
    once `normed` is set in a group."""

    def __init__(self, params, lr=0.1, begin=10, counted="state"):
        super().__init__(params, lr=lr)
        self.begin, self.counted = begin, counted

    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                count = group["count"] if self.counted == "group" else int(state["step"])
                if count >= self.begin or group.get("normed"):
                    p.grad = p.grad / p.grad.norm()
        super().step()
