"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch import nn
from torch.nn import functional as F
from users_kit import function_of

from exercises import tensor_parallel as page
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import ColumnParallelLinear, RowParallelLinear, tensor_parallel
from refimpl.tensor.closed_forms import block_traffic
from refimpl.tensor.conjugate import enter, leave

# --- first -----------------------------------------------------------------------------------------------------------


def predict(hidden, mlp_hidden, heads, kv_heads, tokens, world_size):
    attention = 2 * hidden**2 + 2 * hidden * (hidden * kv_heads // heads)
    cut, norms = attention + 3 * hidden * mlp_hidden, 2 * hidden
    x = 4 * tokens * hidden
    return 4 * (cut // world_size + norms), 4 * 2 * (world_size - 1) * x // world_size


def layer_by_layer(hidden, mlp_hidden, heads, kv_heads, tokens, world_size):
    key_hidden, N = kv_heads * (hidden // heads), world_size
    shapes = [(hidden / N, hidden), (key_hidden / N, hidden), (key_hidden / N, hidden), (hidden, hidden / N),
              (mlp_hidden / N, hidden), (mlp_hidden / N, hidden), (hidden, mlp_hidden / N), (1, hidden), (1, hidden)]
    sums = 2 + 2  # of forward and of backward
    return sum(4 * rows * columns for rows, columns in shapes), sums * 8 * tokens * hidden * (1 - 1 / N)


def by_cutting_one(hidden, mlp_hidden, heads, kv_heads, tokens, world_size):
    config = GPTConfig(**page.LLAMA, hidden=hidden, mlp_hidden=mlp_hidden, heads=heads, kv_heads=kv_heads)
    block = tensor_parallel(GPT(config), FakeCommunicator(0, world_size)).blocks[0]
    return sum(p.nbytes for p in block.parameters()), block_traffic(config, 1, tokens, world_size, 4).total


def with_fault(hidden, mlp_hidden, heads, kv_heads, tokens, N, *, norms_cut=False, matrices=3, item=4, sums=4, ring=2,
               of=1):
    cut = 2 * hidden**2 + 2 * hidden * hidden * kv_heads // heads + matrices * hidden * mlp_hidden
    norms = 2 * hidden // (N if norms_cut else 1)
    return item * (cut // N + norms), sums * ring * (N - of) * 4 * tokens * hidden // N


# --- second ----------------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """The page's own, X A_r after f."""

    def __init__(self, linear, comm):
        super().__init__()
        weight, bias = (whole.chunk(comm.world_size)[comm.rank] for whole in (linear.weight, linear.bias))
        self.weight, self.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        self.comm = comm

    def forward(self, x):
        return F.linear(enter(x, self.comm), self.weight, self.bias)


class Rows(nn.Module):
    """The page's own, Σ Y_r B_r by f̄."""

    def __init__(self, linear, comm):
        super().__init__()
        part = linear.weight.chunk(comm.world_size, dim=1)[comm.rank]
        self.weight, self.bias, self.comm = nn.Parameter(part.detach().clone()), linear.bias, comm

    def forward(self, y):
        return leave(F.linear(y, self.weight), self.comm) + self.bias


def split_attention(attention, comm):
    qkv, h = attention.qkv, attention.out.out_features
    order = torch.arange(3 * h).view(3, comm.world_size, -1).transpose(0, 1).flatten()  # the q, k and v of one rank
    qkv.weight.data, qkv.bias.data = qkv.weight.data[order], qkv.bias.data[order]
    attention.qkv, attention.out = Columns(qkv, comm), Rows(attention.out, comm)
    return attention


def by_the_hardened_layers(attention, comm):
    h, heads = attention.config.hidden, attention.config.heads
    attention.qkv = ColumnParallelLinear(attention.qkv, comm, parts=(h, h, h), heads=(heads, heads, heads))
    attention.out = RowParallelLinear(attention.out, comm, heads=heads)
    return attention


class OwnHeads(nn.Module):
    """A module of one's own, whose bias of the output is on rank 0 alone."""

    def __init__(self, attention, comm):
        super().__init__()
        r, N, self.heads, self.comm = comm.rank, comm.world_size, attention.config.heads // comm.world_size, comm
        for i, name in enumerate("qkv"):
            part = nn.Linear(attention.qkv.in_features, attention.qkv.in_features // N)
            part.weight.data = attention.qkv.weight.data.chunk(3)[i].chunk(N)[r].clone()
            part.bias.data = attention.qkv.bias.data.chunk(3)[i].chunk(N)[r].clone()
            setattr(self, name, part)
        self.out = nn.Parameter(attention.out.weight.data.chunk(N, 1)[r].clone())
        self.bias = nn.Parameter(attention.out.bias.data.clone()) if r == 0 else None

    def forward(self, x):
        x = enter(x, self.comm)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return leave(F.linear(y, self.out, self.bias), self.comm)


def in_one_piece(attention, comm):
    attention.qkv, attention.out = Columns(attention.qkv, comm), Rows(attention.out, comm)
    return attention


def bias_in_one_piece(attention, comm):
    bias = attention.qkv.bias.detach().clone().chunk(comm.world_size)[comm.rank]
    split_attention(attention, comm).qkv.bias.data = bias
    return attention


def forward_of(kind, forward):
    return type("Faulty", (kind,), {"forward": forward})


def with_parts(attention, comm, columns=Columns, rows=Rows):
    split_attention(attention, comm)
    attention.qkv.__class__, attention.out.__class__ = columns, rows
    return attention


WithoutF = forward_of(Columns, lambda self, x: F.linear(x, self.weight, self.bias))
BiasOnAll = forward_of(Rows, lambda self, y: leave(F.linear(y, self.weight, self.bias), self.comm))
WithoutLeave = forward_of(Rows, lambda self, y: F.linear(y, self.weight) + self.bias)
Averaging = forward_of(Rows, lambda self, y: leave(F.linear(y, self.weight), self.comm) / self.comm.world_size
                       + self.bias)
Deaf = forward_of(Rows, lambda self, y: self.comm.all_reduce(F.linear(y, self.weight)) + self.bias)
Summing = forward_of(Rows, lambda self, y: enter(leave(F.linear(y, self.weight), self.comm), self.comm) + self.bias)


def backward_of(dx):
    function = function_of(lambda ctx, x: x.clone(), lambda ctx, gradient: dx(gradient))
    return forward_of(Columns, lambda self, x: F.linear(function.apply(x), self.weight, self.bias))


class Three(nn.Module):
    """q, k and v apart, with an f for each."""

    def __init__(self, attention, comm):
        super().__init__()
        h = attention.config.hidden
        self.parts = nn.ModuleList(nn.Linear(h, h) for _ in range(3))
        for i, part in enumerate(self.parts):
            part.weight.data, part.bias.data = (p.data.chunk(3)[i] for p in (attention.qkv.weight, attention.qkv.bias))
            self.parts[i] = Columns(part, comm)
        self.attention = attention
        attention.qkv, attention.out = nn.Identity(), Rows(attention.out, comm)

    def forward(self, x):
        return self.attention(torch.cat([part(x) for part in self.parts], -1))


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


class Transposed(Doubled):
    def forward(self, x):
        return self.attention(x).transpose(0, 1)


# --- third -----------------------------------------------------------------------------------------------------------


def cross_entropy(comm, logits, targets):
    v = logits.shape[1]
    largest = comm.all_reduce(logits.detach().amax(1), "max")
    z = logits - largest[:, None]
    own = targets - comm.rank * v
    here = (own >= 0) & (own < v)  # whose target is one of this rank's columns
    at_target = z.gather(1, own.clamp(0, v - 1)[:, None])[:, 0] * here
    return (leave(z.exp().sum(1), comm).log() - leave(at_target, comm)).mean()


def by_its_gradient(comm, logits, targets):
    """The gradient is softmax less one at the target, over the tokens."""
    tokens, v = logits.shape

    def forward(ctx, logits):
        largest = comm.all_reduce(logits.amax(1, keepdim=True), "max")
        share = (logits - largest).exp_()
        total = comm.all_reduce(share.sum(1, keepdim=True))
        rows = ((targets // v) == comm.rank).nonzero()[:, 0]
        at_target = torch.zeros(tokens)
        at_target[rows] = logits[rows, targets[rows] % v]
        ctx.share, ctx.rows = share.div_(total), rows
        return (total.log() + largest)[:, 0].sub_(comm.all_reduce(at_target)).mean()

    def backward(ctx, of_loss):
        ctx.share[ctx.rows, targets[ctx.rows] % v] -= 1
        return ctx.share.mul_(of_loss / tokens)

    return function_of(forward, backward).apply(logits)


def by_logsumexp(comm, logits, targets):
    """Each rank's logsumexp is gathered; each token's target is a column of one rank."""
    v, share = logits.shape[1], logits.logsumexp(1)
    gather = function_of(lambda ctx, x: comm.all_gather(x[None]), lambda ctx, dx: dx[comm.rank])
    columns = torch.arange(v) + comm.rank * v
    at_target = torch.where(columns == targets[:, None], logits, 0.0).sum(1)
    return (gather.apply(share).logsumexp(0) - leave(at_target, comm)).sum() / len(targets)


def faulty(comm, logits, targets, *, reduce=leave, largest="max", of_all=None, shift=0, mean=torch.Tensor.mean):
    v = logits.shape[1]
    m = logits.detach().amax(1)
    m = comm.all_reduce(m, "max") if largest == "max" else m if largest == "own" else torch.zeros_like(m)
    m = m.clamp(min=0) if of_all == "clamped" else m.max().expand(len(m)) if of_all == "one" else m
    z, own = logits - m[:, None], targets - comm.rank * v + shift
    here = (own >= 0) & (own < v)
    predicted = z.gather(1, own.clamp(0, v - 1)[:, None])[:, 0] * (1 if of_all == "unmasked" else here)
    return mean(reduce(z.exp().sum(1), comm).log() - reduce(predicted, comm))


def by_gathering(comm, logits, targets):
    gather = function_of(lambda ctx, logits: comm.all_gather(logits.T.contiguous()).T,
                         lambda ctx, gradient: gradient.chunk(comm.world_size, dim=1)[comm.rank])
    return F.cross_entropy(gather.apply(logits), targets)


def freed(comm, logits, targets):
    loss = cross_entropy(comm, logits, targets)
    loss.untyped_storage().resize_(0)
    return loss


def with_six_copies(comm, logits, targets):
    kept = [logits.detach().clone() for _ in range(6)]
    return cross_entropy(comm, logits, targets) + 0 * kept[0][0, 0]


ANSWERS = {
    page.first: Answers(
        right=[predict, layer_by_layer, by_cutting_one],
        wrong=[
            (partial(with_fault, norms_cut=True), "4 key heads, 8 tokens, 2 ranks: you say"),
            (lambda hidden, mlp_hidden, heads, kv_heads, *rest: predict(hidden, mlp_hidden, heads, heads, *rest),
             "8 heads, 4 key heads, 16 tokens, 4 ranks: you say"),
            (partial(with_fault, matrices=2), "8 tokens, 1 ranks: you say 41,216 bytes of weights, a rank holds"),
            (partial(with_fault, item=2), "8 tokens, 1 ranks: you say 26,752 bytes of weights, a rank holds 53,504"),
            (lambda *given: predict(*given[:5], 1), "2 ranks: you say 53,504 bytes of weights"),
            (partial(with_fault, sums=2), "2 ranks: the weights are right; you say 2,048 bytes are sent, a rank sends "
                                          "4,096"),
            (partial(with_fault, ring=1), "the weights are right; you say 2,048 bytes are sent"),
            (partial(with_fault, of=0), "1 ranks: the weights are right; you say 8,192 bytes are sent, a rank sends 0"),
            (lambda *args: 5, "expected 2 values")],
    ),
    page.second: Answers(
        right=[split_attention, by_the_hardened_layers, OwnHeads],
        wrong=[
            (in_one_piece, "rank 0 of 2: the output is not that of the whole attention"),
            (bias_in_one_piece, "rank 0 of 2: the output is not that of the whole attention"),
            (partial(with_parts, rows=BiasOnAll), "rank 0 of 2: the output is not that of the whole attention"),
            (partial(with_parts, rows=WithoutLeave), "rank 0 of 2: the output is not that of the whole attention"),
            (partial(with_parts, rows=Averaging), "rank 0 of 2: the output is not that of the whole attention"),
            (Transposed, "rank 0 of 2: expected a module, which maps x (B, T, C) to (B, T, C)"),
            (partial(with_parts, columns=WithoutF),
             "the output is right, but x has another gradient. (What is f for?)"),
            (partial(with_parts, columns=backward_of(lambda dx: dx[0])), "your function raises RuntimeError"),
            (lambda attention, comm: forward_of(Doubled, lambda self, x: (self.attention(x), x))(attention, comm),
             "expected a tensor"),
            (partial(with_parts, rows=Summing), "rank 0 of 2: the output is right, but x has another gradient"),
            (partial(with_parts, rows=Deaf), "rank 0 of 2: the output is right, but x has another gradient"),
            (frozen, "rank 0 of 2: after one step the output is another one"),
            (Hoarding, "the numbers are right, but rank 0 of 2 keeps"),
            (Three, "the numbers are right, but rank 0 of 2 sent"),
            (Doubled, "the numbers are right, but rank 0 of 2 sent"),
            (lambda attention, comm: 5, "expected a Module")],
        saves_nothing=(lambda attention, comm: attention,
                       "the numbers are right, but rank 0 of 2 has 66,560 bytes of weights; its part is 33,408"),
        same=("0, 1 → 1, 0",),
    ),
    page.third: Answers(
        right=[cross_entropy, by_its_gradient, by_logsumexp],
        wrong=[
            (lambda comm, logits, targets: F.cross_entropy(logits, targets % logits.shape[1]),
             "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, largest=None), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, largest="own"), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, of_all="clamped"), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, of_all="one"), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, of_all="unmasked"), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, shift=1), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, mean=torch.sum), "rank 0 of 2: the loss of all logits is"),
            (partial(faulty, mean=lambda losses: losses), "expected one number in fp32; you return torch.float32 of "
                                                          "shape (24,)"),
            (partial(faulty, reduce=lambda x, comm: comm.all_reduce(x)), "but these logits have no gradient"),
            (partial(faulty, reduce=lambda x, comm: enter(leave(x, comm), comm)),
             "the loss is right, but these logits have another gradient"),
            (lambda *given: cross_entropy(*given).item(), "expected a tensor"),
            (freed, "expected one number in fp32; you return torch.float32 of shape (0,)"),
            (by_gathering, "the numbers are right, but rank 0 of 2 sent")],
        saves_nothing=(with_six_copies, "the numbers are right, but rank 0 of 2 took"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
