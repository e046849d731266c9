"""Gradient accumulation in one screen: the gradient of a large batch, with the activations of one micro-batch.

A batch has B rows, and n targets that count (those that are not −100). Its loss is the mean of their n terms ℓ. Cut the
batch into micro-batches m = 1 … k, of which m has n_m targets and the mean loss L_m. Then

    L = (1/n) Σᵢ ℓᵢ = Σ_m (n_m / n) L_m            so            ∇L = Σ_m (n_m / n) ∇L_m

A gradient is a sum, so each micro-batch can add its share to `.grad` and free its activations before the next begins:

    bytes     states + activations(one micro-batch)          instead of          states + activations(the whole batch)

The usual 1/k for every micro-batch is right only if each has as many targets. "Accurate, Large Minibatch SGD" (Goyal et
al. 2017), section 3, "Gradient aggregation": divide each part's loss by the terms of the whole, not by its own.
"""

import torch


def accumulate(model, tokens_BT, targets_BT, micro_batch):
    """Add the gradient of `model(tokens_BT, targets_BT)`, a mean loss, to `.grad`. Returns that loss, without a graph.

        loss = accumulate(model, tokens, targets, micro_batch=8)        # instead of loss = model(tokens, targets)
        optimizer.step()                                                #        and loss.backward()

    B rows of T tokens; b of them are in a micro-batch.
    """
    n = count(targets_BT)
    loss = 0.0
    for tokens_bT, targets_bT in zip(tokens_BT.split(micro_batch), targets_BT.split(micro_batch), strict=True):
        n_m = count(targets_bT)
        if n_m == 0:
            continue  # the mean of no terms is NaN, and its weight is 0
        part = model(tokens_bT, targets_bT) * (n_m / n)  # (n_m / n) L_m
        part.backward()  # .grad += (n_m / n) ∇L_m, and the activations of this micro-batch are freed
        loss = loss + part.detach().float()
    return loss


def count(targets):
    """Count the targets that are terms of the mean: n, or n_m of a micro-batch."""
    return (targets != -100).sum().item()


class Fp32Sums:
    """Sum gradients of bf16 weights in fp32: `with Fp32Sums(model.parameters()): accumulate(…)`.

    bf16 has 8 significant bits: a share that is 2⁸ times smaller than the sum so far would not change it ("Accuracy and
    Stability of Numerical Algorithms", Higham 2002, section 4.2). So each gradient is added to an fp32 sum as soon as
    autograd has computed it, and freed. At the end each sum is rounded once. The sums take 4 bytes a parameter.
    """

    def __init__(self, parameters):
        self.parameters, self.sums = list(parameters), {}

    def __enter__(self):
        self.hooks = [p.register_post_accumulate_grad_hook(self.add) for p in self.parameters]

    def add(self, p):
        """Move `p.grad`, which autograd has just written, to the sum."""
        gradient, p.grad = p.grad, None
        if p in self.sums:
            self.sums[p] += gradient  # bf16 is widened on the way: no fp32 copy of the gradient
        else:
            self.sums[p] = gradient.to(torch.float32)

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        while self.sums:
            p, total = self.sums.popitem()
            p.grad = total.to(p.dtype)
