"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch import nn
from torch.nn import functional as F
from users_kit import function_of

from exercises import tensor_parallel as page
from refimpl.tensor import ColumnParallelLinear, RowParallelLinear
from refimpl.tensor.conjugate import enter, leave


def predict(hidden, mlp_hidden, heads, kv_heads, tokens, world_size, *, norms_cut=False, collectives=4):
    cut = 2 * hidden**2 + 2 * hidden * hidden * kv_heads // heads + 3 * hidden * mlp_hidden
    norms = 2 * hidden // (world_size if norms_cut else 1)
    return 4 * (cut // world_size + norms), collectives * 2 * (world_size - 1) * 4 * tokens * hidden // world_size


def as_many_key_heads(hidden, mlp_hidden, heads, kv_heads, tokens, world_size):
    return predict(hidden, mlp_hidden, heads, heads, tokens, world_size)


class Columns(nn.Module):
    """The page's own, X A_r after f."""

    def __init__(self, linear, comm, enter=enter):
        super().__init__()
        weight, bias = (whole.chunk(comm.world_size)[comm.rank] for whole in (linear.weight, linear.bias))
        self.weight, self.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        self.comm, self.enter = comm, enter

    def forward(self, x):
        return F.linear(self.enter(x, self.comm), self.weight, self.bias)


class Rows(nn.Module):
    """The page's own, Σ Y_r B_r by f̄."""

    def __init__(self, linear, comm, bias_once=True):
        super().__init__()
        part = linear.weight.chunk(comm.world_size, dim=1)[comm.rank]
        self.weight, self.bias = nn.Parameter(part.detach().clone()), linear.bias
        self.comm, self.bias_once = comm, bias_once

    def forward(self, y):
        if self.bias_once:
            return leave(F.linear(y, self.weight), self.comm) + self.bias
        return leave(F.linear(y, self.weight, self.bias), self.comm)


def split_attention(attention, comm, enter=enter, bias_once=True, in_one_piece=False):
    qkv = attention.qkv
    if not in_one_piece:
        order = torch.arange(192).view(3, comm.world_size, -1).transpose(0, 1).flatten()  # the q, k and v of one rank
        qkv.weight.data, qkv.bias.data = qkv.weight.data[order], qkv.bias.data[order]
    attention.qkv, attention.out = Columns(qkv, comm, enter), Rows(attention.out, comm, bias_once)
    return attention


class Three(nn.Module):
    """q, k and v apart, with an f for each."""

    def __init__(self, attention, comm):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        for i, part in enumerate(self.parts):
            part.weight.data, part.bias.data = (p.data.chunk(3)[i] for p in (attention.qkv.weight, attention.qkv.bias))
            self.parts[i] = Columns(part, comm)
        self.attention = attention
        attention.qkv, attention.out = nn.Identity(), Rows(attention.out, comm)

    def forward(self, x):
        return self.attention(torch.cat([part(x) for part in self.parts], -1))


def by_the_hardened_layers(attention, comm):
    attention.qkv = ColumnParallelLinear(attention.qkv, comm, parts=(64, 64, 64), heads=(4, 4, 4))
    attention.out = RowParallelLinear(attention.out, comm, heads=4)
    return attention


def frozen(attention, comm):
    """A weight gets no gradient."""
    split_attention(attention, comm).out.weight.requires_grad_(False)
    return attention


class Doubled(nn.Module):
    """Forward twice, the first time in vain."""

    def __init__(self, attention, comm):
        super().__init__()
        self.attention = split_attention(attention, comm)

    def forward(self, x):
        with torch.no_grad():
            self.attention(x)
        return self.attention(x)


class Hoarding(Doubled):
    """Keeps something as large as x."""

    def forward(self, x):
        self.kept = x.detach().clone(), x.detach().clone()
        return self.attention(x)


def cross_entropy(comm, logits, targets, reduce=leave, largest=True):
    v = logits.shape[1]
    m = comm.all_reduce(logits.detach().amax(1), "max") if largest else 0 * logits.detach()[:, 0]
    z, own = logits - m[:, None], targets - comm.rank * v
    here = (own >= 0) & (own < v)
    predicted = z.gather(1, own.clamp(0, v - 1)[:, None])[:, 0] * here
    return (reduce(z.exp().sum(1), comm).log() - reduce(predicted, comm)).mean()


def by_gathering(comm, logits, targets):
    gather = function_of(lambda ctx, logits: comm.all_gather(logits.T.contiguous()).T,
                         lambda ctx, gradient: gradient.chunk(comm.world_size, dim=1)[comm.rank])
    return F.cross_entropy(gather.apply(logits), targets)


def in_place_of_nothing(comm, logits, targets):
    kept = [logits.detach().clone() for _ in range(6)]
    return cross_entropy(comm, logits, targets) + 0 * kept[0][0, 0]


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, norms_cut=True), "4 key heads, 8 tokens, 2 ranks: you say"),
            (as_many_key_heads, "8 heads, 4 key heads, 16 tokens, 4 ranks: you say"),
            (partial(predict, collectives=2), "the weights are right; you say"),
            (lambda *args: 5, "expected a pair")],
    ),
    page.second: Answers(
        right=[split_attention, by_the_hardened_layers],
        wrong=[
            (partial(split_attention, in_one_piece=True), "rank 0 of 2: the output is not that of the whole attention"),
            (partial(split_attention, bias_once=False), "rank 0 of 2: the output is not that of the whole attention"),
            (partial(split_attention, enter=lambda x, comm: x), "rank 0 of 2: the output is right, but x has another gradient"),
            (frozen, "rank 0 of 2: after one step the output is another one"),
            (lambda attention, comm: attention, "the numbers are right, but rank 0 of 2 has 66,560 bytes of weights"),
            (Hoarding, "the numbers are right, but rank 0 of 2 keeps"),
            (Three, "the numbers are right, but rank 0 of 2 sent"),
            (Doubled, "the numbers are right, but rank 0 of 2 sent"),
            (lambda attention, comm: 5, "expected a module")],
    ),
    page.third: Answers(
        right=[cross_entropy],
        wrong=[
            (lambda comm, logits, targets: F.cross_entropy(logits, targets % logits.shape[1]), "rank 0 of 2: the loss of all logits is"),
            (partial(cross_entropy, largest=False), "rank 0 of 2: the loss of all logits is"),
            (partial(cross_entropy, reduce=lambda x, comm: comm.all_reduce(x)), "rank 0 of 2: the loss is right, but these logits have no gradient"),
            (by_gathering, "the numbers are right, but rank 0 of 2 sent"),
            (in_place_of_nothing, "the numbers are right, but rank 0 of 2 took")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
