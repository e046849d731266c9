"""Tensor parallelism in one screen: each of N ranks has 1/N of a layer's weights, and computes 1/N of the layer.

An MLP is Z = GeLU(X A) B. Each column of X A goes through GeLU alone, so A is cut by columns and B by rows:

    A = [A₁ … A_N]        Y_r = GeLU(X A_r)        Z = Y B = Σ_r Y_r B_r

In attention A holds q, k and v, Y is the output of the heads, and the columns of one head go to one rank. The ranks
communicate twice: Z is a sum over ranks in forward, and dX = Σ_r dX_r is one in backward. Each pair is conjugate:

         stands at    forward           backward
    f    X A_r        identity          all_reduce        tensor parallelism: X is whole on every rank
    f̄    Σ Y_r B_r    all_reduce        identity
    g    X A_r        all_gather        reduce_scatter    and sequence parallelism: outside, a rank has T/N tokens alone
    ḡ    Σ Y_r B_r    reduce_scatter    all_gather

    one layer        saved on a rank, 16 bits, dropout    a rank sends, times (N−1)/N and the bytes of X
    one rank         sbh (34 + 5as/h)                     0
    with f and f̄     sbh (10 + 24/N + 5as/(hN))           8: two all_reduces in forward, two in backward
    with g and ḡ     sbh (34 + 5as/h) / N                 10: 4 in forward, 6 in backward, which gathers each X again

s tokens in a sequence, b sequences, h hidden, a heads. "Megatron-LM" (Shoeybi et al. 2019), section 3: f, f̄ (g there).
"Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022), section 4.2 and table 2.
"""

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.functional import linear  # linear(x, w) = x wᵀ: a weight is A or B transposed


def pairs(comm, sequence):
    """Return what f and f̄ do, or g and ḡ: (forward, backward) of each."""
    if sequence:
        return (comm.all_gather, comm.reduce_scatter), (comm.reduce_scatter, comm.all_gather)
    return (torch.Tensor.detach, comm.all_reduce), (comm.all_reduce, torch.Tensor.detach)


class Column(Function):
    """Compute X A_r after f or g. It saves X as the rank has it: g gathers it again in backward."""

    @staticmethod
    def forward(ctx, x, a, f, f_backward):
        ctx.save_for_backward(x, a)
        ctx.f, ctx.f_backward = f, f_backward
        return linear(f(x), a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        return ctx.f_backward(dy @ a), dy.flatten(0, 1).T @ ctx.f(x).flatten(0, 1), None, None


class Total(Function):
    """Compute Z from each rank's Y_r B_r by f̄ or ḡ."""

    @staticmethod
    def forward(ctx, z, f_bar, f_bar_backward):
        ctx.f_bar_backward = f_bar_backward
        return f_bar(z)

    @staticmethod
    def backward(ctx, dz):
        return ctx.f_bar_backward(dz), None, None


class Split(nn.Module):
    """Compute X + Z, Z = Σ_r between(norm(X) A_r) B_r: half a layer. X is (T, B, C), or (T/N, B, C) if `sequence`.
    `norm`, `first`, `second`: the modules of the whole, with A and B, alike on all ranks. `between`: GeLU or `heads`.
    `sizes`: the columns of the matrices side by side in A, such as q, k and v, each of which is cut in N."""

    def __init__(self, norm, first, second, between, comm, sizes, sequence=False):
        super().__init__()
        self.norm, self.between, (self.f, self.f_bar) = norm, between, pairs(comm, sequence)
        self.a, self.a_bias = (0 if whole is None else nn.Parameter(
            torch.cat([x.chunk(comm.world_size)[comm.rank] for x in whole.split(sizes)]))
            for whole in (first.weight, first.bias))
        self.b = nn.Parameter(second.weight.chunk(comm.world_size, dim=1)[comm.rank].clone())
        self.b_bias = 0 if second.bias is None else second.bias  # whole on each rank, added to the sum
        for p in filter(torch.is_tensor, [*norm.parameters(), self.b_bias] if sequence else ()):
            p.register_hook(comm.all_reduce)  # a rank has the gradient of its T/N tokens

    def forward(self, x):
        y = self.between(Column.apply(self.norm(x), self.a, *self.f) + self.a_bias)
        return x + (Total.apply(linear(y, self.b), *self.f_bar) + self.b_bias)


def heads(qkv, head_dim, attention):
    """Return attention of this rank's heads: (T, B, 3C/N) -> (T, B, C/N). `attention`: of (B, H/N, T, D) each."""
    q, k, v = (x.unflatten(2, (-1, head_dim)).permute(1, 2, 0, 3) for x in qkv.chunk(3, dim=2))
    return attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
