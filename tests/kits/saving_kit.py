"""What the tests of saving share: ranks that hold parts of a small model by hand, and engines of ZeRO."""

import contextlib
import functools
import zlib

import torch
from torch import nn
from zero_kit import ENGINES, WIDTH, fixed, rows_of
from zero_steps import update

from refimpl import saving
from refimpl.comm import FakeCommunicator
from refimpl.saving import TrainingState
from refimpl.sharding import Shard, ShardSpec, set_spec

OPTIMIZERS = {"adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
              "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
BY_ROWS = {"up.weight": 0, "up.bias": 0, "down.weight": 0, "still.weight": 1}
BY_COLUMNS = {"up.weight": 1, "down.weight": 1, "still.weight": 0}
MIXED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Small(nn.Module):
    """Weights to cut, a norm, a tied weight, one that is not trained, one in bf16, of 0 dimensions and of 0 elements,
    and buffers that are saved and not."""
    def __init__(self, few=False):
        super().__init__()
        self.up, self.tied = nn.Linear(5, 6), nn.Linear(5, 6, bias=False)
        self.still, self.scale = nn.Linear(4, 3, bias=False), nn.Parameter(torch.tensor(1.5))
        self.tied.weight = self.up.weight
        self.still.requires_grad_(False)
        if not few:
            self.down, self.norm = nn.Linear(6, 5, bias=False), nn.LayerNorm(7)
            self.low, self.none = nn.Parameter(torch.randn(3, 3).bfloat16()), nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3, 2).t())  # not contiguous
        self.register_buffer("cache", torch.randn(2), persistent=False)


few = functools.partial(Small, few=True)


def part(tensor, spec):
    """A spec's elements of a whole tensor, flat, by indexing alone."""
    block = tensor.detach()[tuple(slice(o, o + n) for o, n in zip(spec.offsets, spec.lengths, strict=True))]
    return block.reshape(-1)[spec.first : spec.end].clone()


class Holder:
    """One rank of stages × data-parallel × tensor-parallel ranks. Tensors that `dims` names are cut along that dim over
    the tensor-parallel ranks, what is trained or frozen is cut flat over the data-parallel ones."""

    def __init__(self, comm, dims=None, tp=1, stages=1, optimizer="adamw", seed=0, away=False, build=Small):
        fixed(seed)
        self.comm, self.dims, self.tp, self.model = comm, dims or {}, tp, build()
        self.dp = comm.world_size // (tp * stages)
        self.stage, self.d, self.t = comm.rank // (self.dp * tp), comm.rank // tp % self.dp, comm.rank % tp
        self.step, self.now, self.loads, self.asleep, self.away = 0, [], [], {}, away
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.shards = [self.shard(name, x, group=number // 3) for number, (name, x) in enumerate(named)
                       if name == "low" or number * stages // len(named) == self.stage]  # `low` is on all stages
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.names = [[name for name in trained if ("weight" in name) == weights] for weights in (True, False)]
        own = {shard.spec.name: shard.own for shard in self.shards if shard.own is not None}
        groups = [{"params": [own[name] for name in names if name in own], **more} for names, more in
                  zip(self.names, ({"weight_decay": 0.2}, {"lr": 0.03, "weight_decay": 0.0}), strict=True)]
        self.optimizer = OPTIMIZERS.get(optimizer, optimizer)(groups)
        for group in {shard.group for shard in self.shards} if away else ():
            self.put(group)

    def shard(self, name, x, group):
        """This rank's shard of a whole tensor."""
        kind = ("buffers" if not isinstance(x, nn.Parameter) else "parameters" if x.requires_grad else "frozen")
        spec = ShardSpec(name, x.shape, replicas=self.replicas(name))
        if name in self.dims:
            dim, n = self.dims[name], x.shape[self.dims[name]]
            low, high = self.t * n // self.tp, (self.t + 1) * n // self.tp
            spec = ShardSpec(name, x.shape, [low if d == dim else 0 for d in range(x.dim())],
                             [high - low if d == dim else size for d, size in enumerate(x.shape)])
        if spec.lengths != spec.shape:
            x.data = part(x, spec).view(spec.lengths)
            set_spec(x, spec)
        first = self.comm.rank == min(spec.replicas or (self.comm.rank,))
        if kind == "buffers":
            return Shard(spec, x.detach(), kind, x.dtype, None, spec if first and self.d == 0 else None, group)
        spec = spec.cut(self.d * spec.numel // self.dp, (self.d + 1) * spec.numel // self.dp)
        values = x.detach().reshape(-1)[spec.first : spec.end].clone()
        values = values.float() if x.dtype == torch.bfloat16 else values
        own = nn.Parameter(values) if kind == "parameters" else None
        return Shard(spec, values if own is None else own.detach(), kind, x.dtype, own, spec if first else None, group)

    def replicas(self, name):
        """Ranks that hold the same of a tensor that is not cut into blocks."""
        size = self.dp * self.tp
        stages = range(self.comm.world_size // size) if name == "low" else [self.stage]
        found = tuple(stage * size + self.d * self.tp + t for stage in stages for t in range(self.tp))
        return found if len(found) > 1 else ()

    @property
    def state(self):
        return TrainingState(self.comm, self.shards, self.optimizer, self.names, self.model, self.step,
                             {"kind": "by hand"}, self.loaded)

    def train(self, steps):
        """Steps with gradients that depend on the place of an element alone, so on no cut."""
        for _ in range(steps):
            for shard in self.shards:
                if shard.own is not None and shard.spec.name != "idle":
                    seed = zlib.crc32(f"{shard.spec.name} {self.step}".encode())
                    whole = torch.randn(shard.spec.shape, generator=torch.Generator().manual_seed(seed))
                    shard.own.grad = part(whole, shard.spec)
            self.optimizer.step()
            group = self.optimizer.param_groups[0]
            group["lr"] = group["lr"] * 0.9  # not in place: tests share an lr in a tensor
            if hasattr(self.model, "seen"):
                self.model.seen += 1
            self.step += 1
        return self

    @contextlib.contextmanager
    def loaded(self, group):
        """As of a store that keeps only one group at a time."""
        self.now.append(group)
        self.loads.append(group)
        assert len(self.now) == 1, f"groups {self.now} are loaded at a time"
        for x, content in self.asleep.pop(group, ()):
            x.untyped_storage().resize_(content.nbytes)
            x.copy_(content)
        try:
            yield
        finally:
            if self.away:
                self.put(group)
            self.now.remove(group)

    def put(self, group):
        """Take a group's contents away."""
        tensors = [x for shard in self.shards if shard.group == group and shard.kind != "buffers" for x in
                   [shard.values, *(x for x in self.optimizer.state.get(shard.own, {}).values() if x.dim())]]
        self.asleep[group] = [(x, x.clone()) for x in tensors]
        for x in tensors:
            x.untyped_storage().resize_(0)

    def save(self, directory, **how):
        saving.save(self.state, directory, **how)

    def load(self, directory, **how):
        self.step = saving.load(self.state, directory, **how)
        return self

    def save_weights(self, path, *dtype):
        saving.save_weights(self.state, path, *dtype)

    def state_dict(self):
        return saving.state_dict(self.state)

    def load_state_dict(self, sd):
        self.step = saving.load_state_dict(self.state, sd)
        return self


def alone(**how):
    """A holder of everything."""
    return Holder(FakeCommunicator(0, 1), **how)


def whole_state(model, optimizer):
    """Of one rank, which has all parameters of a model."""
    shards = [Shard(ShardSpec(name, p.shape), p.detach().view(-1), "parameters", p.dtype, p, ShardSpec(name, p.shape))
              for name, p in model.named_parameters()]
    names = [name for name, _ in model.named_parameters()]
    return TrainingState(FakeCommunicator(0, 1), shards, optimizer, [names], model)


def differing(a, b):
    """Where two state_dicts are not equal to the bit; on a rank that has none, nothing."""
    if not (a and b):
        return []
    found = [key for key in ("class", "step", "param_groups") if a[key] != b[key]]
    found += [name for name in {**a["model"], **b["model"]} if not torch.equal(a["model"][name], b["model"][name])]
    for name in {**a["optimizer"], **b["optimizer"]}:
        ours, theirs = a["optimizer"][name], b["optimizer"][name]
        found += [(name, key) for key in {**ours, **theirs} if ours[key].dtype != theirs[key].dtype
                  or not torch.equal(ours[key], theirs[key])]
    return found


# --- engines of ZeRO -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied weights, a frozen layer, buffers that are saved and not, a parameter of no dimensions, and dropout."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.three.requires_grad_(False)
        self.scale, self.dropout = nn.Parameter(torch.tensor(1.5)), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.three(self.two(self.dropout(self.one(x)).tanh()).tanh()) * self.scale


def build(seed=0, dtype=None):
    fixed(seed)
    return Odd().to(dtype)


def two_groups(named):
    """Biases are not decayed, and learn faster."""
    return [{"params": [p for _, p in named if p.dim() == 2], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.dim() < 2], "lr": 0.03, "weight_decay": 0.0}]


def make(comm, stage=2, optimizer="adamw", seed=0, dtype=None, **options):
    return ENGINES[stage](build(seed, dtype), comm, OPTIMIZERS[optimizer], groups=two_groups,
                          **{"bucket_bytes": 500, **options})


def train(engine, steps):
    """Train on, with the batches of the steps that come next."""
    for step in range(engine._steps, engine._steps + steps):
        x = rows_of(engine.comm, step, rows=12).to(next(engine.model.parameters()).dtype)
        update(engine, engine.forward(x).square().mean())
        engine.param_groups[0]["lr"] *= 0.9
    return engine


class Plain(nn.Module):
    """Nothing but a linear layer, so that a saved fp32 state fits a bf16 model: no buffers to be rounded."""

    def __init__(self, *shape):
        super().__init__()
        self.layer = nn.Linear(*shape, bias=False)

    def forward(self, x):
        return self.layer(x)


def plain(comm, stage, dtype=None, shape=(8, 8), seed=0, optimizer=torch.optim.Adam, make=ENGINES.__getitem__):
    torch.manual_seed(seed)
    engine = make(stage)(Plain(*shape).to(dtype), comm, optimizer, bucket_bytes=500)
    update(engine, engine.forward(torch.ones(2, shape[0]).to(dtype)).square().mean())
    return engine
