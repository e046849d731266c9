"""Fewer bytes on the wire in one screen: send the k largest numbers of a gradient, and keep the rest for the next step.

Of a gradient of n numbers each of N ranks sends k = ρn, with their places, and remembers what it has not sent, e:

    x = g + e                       this step's gradient, and what was never sent
    S = the places of the k largest |x|
    e = x, but 0 in S               the residual: it is sent as soon as it has grown large enough
    g = (1/N) Σ_r x_r[S_r]          each rank adds up what all ranks sent

    a rank sends, in bytes    (N−1) · k · (4 + 4)          k places as int32, k numbers as fp32: all_gather
    without compression       2(N−1)/N · n · 4             all_reduce

So it pays while ρ < 1/N. Without e a number that is never among the largest is never learned; with it everything is
sent in the end: Σ over steps of what was sent, plus e, is Σ of all gradients. "Deep gradient compression" (Lin et al.
2018), section 3; "Sparsified SGD with memory" (Stich et al. 2018), algorithm 1, proves that it converges as SGD does.
"""

import torch


class TopK:
    """Averages gradients over the ranks of `comm`: of refimpl.comm, or the ring of `collectives`. `ratio` is ρ."""

    def __init__(self, comm, ratio):
        self.comm, self.ratio, self.residual = comm, ratio, {}

    def average(self, name, gradient):
        """Return the average of what the ranks send of the gradient `name`, in its shape."""
        x = gradient.flatten() + self.residual.get(name, 0)  # (n,)
        k = max(1, round(self.ratio * len(x)))
        places = x.abs().topk(k).indices  # (k,)
        payload = torch.cat([places.int().view(torch.uint8), x[places].view(torch.uint8)])  # (8k,) bytes
        self.residual[name] = x.index_fill(0, places, 0)
        total = torch.zeros_like(x)
        for sent in self.comm.all_gather(payload).view(self.comm.world_size, -1):
            total.index_add_(0, sent[: 4 * k].view(torch.int32), sent[4 * k :].view(x.dtype))
        return (total / self.comm.world_size).view(gradient.shape)


class Trainer:
    """Data parallelism with it: `loss.backward()`, then `step()`. All ranks build the same model."""

    def __init__(self, model, comm, optimizer, ratio):
        self.model, self.topk, self.optimizer = model, TopK(comm, ratio), optimizer(model.parameters())

    def step(self):
        """Average all gradients, and update the parameters, on all ranks alike."""
        for name, p in self.model.named_parameters():
            p.grad = self.topk.average(name, p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
