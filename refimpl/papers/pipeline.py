"""Pipeline parallelism in one screen: p ranks have a run of layers each, and micro-batches flow through them.

Rank r gets x from rank r − 1, sends y = stage(x) to rank r + 1, and later gets dy back, to send dx. Micro-batch k is in
flight on a rank from its forward until its backward: its graph stays there. The order decides how many are in flight.
1F1B: rank r runs p − 1 − r forwards ahead, then one forward and one backward in turn. With F forwards and G backwards:

    p = 4, m = 6           ──── time ───→
    rank 0    F0 F1 F2 F3          G0 F4 G1 F5 G2 .. G3 .. G4 .. G5
    rank 1       F0 F1 F2       G0 F3 G1 F4 G2 F5 G3 .. G4 .. G5
    rank 2          F0 F1    G0 F2 G1 F3 G2 F4 G3 F5 G4 .. G5
    rank 3             F0 G0 F1 G1 F2 G2 F3 G3 F4 G4 F5 G5

    in flight on rank r      min(m, p − r) micro-batches (all forwards first, as in GPipe: m)
    idle                     (p − 1) (time of a forward + time of a backward), whatever m
    a rank sends             m times y, but for the last rank, and m times dx, but for rank 0

The loss is the batch's mean, L = Σ n_k / n · L_k: each micro-batch's mean is scaled by its share of the n targets,
once, where its backward begins. Gradients then add up to those of the whole batch.

"PipeDream" (Narayanan et al. 2019), section 3.2; "Efficient large-scale language model training on GPU clusters"
(Narayanan et al. 2021), section 2.2.1. All forwards first: "GPipe" (Huang et al. 2019).
"""

from collections import deque

import torch
from torch.autograd.graph import get_gradient_edge


def one_forward_one_backward(stage, comm, inputs, targets, loss, like):
    """Run a step of 1F1B. Gradients are added to the parameters of `stage`, this rank's module.

    `inputs`, `targets`: lists of micro-batches; rank 0 reads the first, the last rank the second. `like`: a tensor of
    the shape and dtype of what goes between ranks. Returns the mean loss of the batch on the last rank, 0 elsewhere.
    """
    p, r, m = comm.world_size, comm.rank, len(targets)
    n, ahead, total = sum(len(each) for each in targets), min(p - 1 - r, m), 0
    in_flight, sent = deque(), {}

    def send(x, to):
        """Send x without waiting for it; what was sent there before has left, or leaves now, and is freed."""
        if to in sent:
            sent.pop(to).wait()
        sent[to] = comm.send(x, to, async_op=True)

    for k in range(m + ahead):
        if k < m:
            x = inputs[k] if r == 0 else comm.recv(like, r - 1).requires_grad_()
            y = stage(x)
            if r == p - 1:
                y = loss(y, targets[k]) * (len(targets[k]) / n)
                total += y.detach()
            else:
                send(y.detach(), r + 1)
            in_flight.append((x, get_gradient_edge(y)))  # the graph's end: y itself goes when it has left
            del x, y
        if k >= ahead:
            x, end = in_flight.popleft()
            dy = None if r == p - 1 else comm.recv(like, r + 1)
            torch.autograd.backward([end], [dy])
            if r > 0:
                send(x.grad, r - 1)
            del x, end, dy
    for handle in sent.values():
        handle.wait()
    return total
