"""A model that is split by hand over ranks, by tensors or by layers: what ZeRO has to stand on top of."""

import functools

import torch
from torch import nn

from refimpl.mesh import Mesh
from refimpl.sharding import ShardSpec, set_spec

WIDTH, HIDDEN, ROWS, BLOCKS = 6, 8, 12, 2
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Into(torch.autograd.Function):
    """x goes to all ranks of a tensor-parallel group; its gradient is the sum over them."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.all_reduce(gradient.contiguous()), None


class OutOf(torch.autograd.Function):
    """The sum over a tensor-parallel group; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MLP(nn.Module):
    """x + W₂ tanh(W₁ norm(x) + b₁) + b₂. With `tp` this rank has some rows of W₁ and b₁ and some columns of W₂."""

    def __init__(self, tp=None):
        super().__init__()
        self.tp, parts = tp, 1 if tp is None else tp.world_size
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN // parts)
        self.down, self.bias = nn.Linear(HIDDEN // parts, WIDTH, bias=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        y = self.norm(x)
        y = self.down(self.up(y if self.tp is None else Into.apply(y, self.tp)).tanh())
        return x + (y if self.tp is None else OutOf.apply(y, self.tp)) + self.bias


def whole(dtype=torch.float64):
    """The model that nobody has split."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP() for _ in range(BLOCKS))).to(dtype)
    model.register_buffer("seen", torch.zeros(2))
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=dtype)
    return model


SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # along which dimension


def split(tp, dtype=torch.float64, peers=None, declare=True):
    """This rank's part of `whole`. `peers`: numbers in the world of the ranks of its tensor-parallel group."""
    of, mine = whole(dtype), nn.Sequential(*(MLP(tp) for _ in range(BLOCKS))).to(dtype)
    mine.register_buffer("seen", of.seen)
    for name, theirs in of.named_parameters():
        ours, dim = mine.get_parameter(name), SPLIT.get(name.split(".", 1)[1])
        if dim is None:
            ours.data = theirs.data.clone()
            spec = ShardSpec(name, tuple(theirs.shape), replicas=tuple(peers if declare else ()))
        else:
            ours.data = theirs.data.chunk(tp.world_size, dim)[tp.rank].clone()
            offsets = [0] * theirs.dim()
            offsets[dim] = tp.rank * ours.shape[dim]
            spec = ShardSpec(name, tuple(theirs.shape), tuple(offsets), tuple(ours.shape))
        set_spec(ours, spec)
    set_spec(mine.seen, ShardSpec("seen", (2,), replicas=tuple(peers)))
    return mine


def mesh(comm, tp):
    """(this rank's tensor-parallel communicator, its data-parallel one, its peers in the first)."""
    made = Mesh(tp=tp, dp=comm.world_size // tp).connect(comm)
    return made.get_parallel_group("tp"), made.get_parallel_group("dp"), made.ranks("tp")


def rows(step, dtype=torch.float64):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def step_of(engine, step, max_norm=0.05):
    """The clipped norm of one step."""
    x = rows(step, next(engine.model.parameters()).dtype).chunk(engine.comm.world_size)[engine.comm.rank]
    engine.backward(engine.forward(x).square().mean())
    norm = engine.clip_grad_norm_(max_norm)
    engine.step()
    return norm.item()


def train_alone(steps):
    """(norms, model) of one process with the whole batch."""
    model, norms = whole(), []
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        model(rows(step)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model
