"""What the tests of ZeRO share: the engines, a small GPT and models that are not a plain stack, and how they train."""

import contextlib
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

ENGINES = (DataParallel, Zero1, Zero2, Zero3)  # by stage
SHARDED = ENGINES[1:]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
FAST = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def fixed(seed=0):
    """One thread, and the same random numbers from here on."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def copied(model):
    """{name: copy of the parameter}."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def parameters_of(engine):
    """{name: copy of the whole parameter}."""
    with engine.gathered() if engine.stage == 3 else contextlib.nullcontext():
        return copied(engine.model)


def farthest(a, b):
    """The largest difference of any element, of two dicts of tensors."""
    return max((a[name] - b[name]).abs().max().item() for name in b)


def equal(a, b):
    """Whether two dicts of tensors are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- a small GPT -----------------------------------------------------------------------------------------------------

CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=3, hidden=32, heads=4)
ROWS = 24  # of a batch: any world up to 4 divides it, and 8
BUCKET = 20_000  # bytes


def gpt(config=CONFIG, dtype=None, device=None):
    fixed()
    return GPT(config, dtype=dtype, device=device)


def token_batches(steps, micro_batches=1):
    """(steps, micro_batches, ROWS, 16)."""
    return torch.randint(0, 64, (steps, micro_batches, ROWS, 16), generator=torch.Generator().manual_seed(1))


def own_rows(comm, rows):
    """This rank's part of a batch."""
    return rows.chunk(comm.world_size)[comm.rank]


def train_gpt(engine, steps=10, micro_batches=1, max_norm=None):
    """Train, with `no_sync` around all micro-batches but the last, and clip if asked to."""
    for tokens in token_batches(steps, micro_batches):
        gradients_of_step(engine, tokens)
        if max_norm is not None:
            engine.clip_grad_norm_(max_norm)
        engine.step()


def gradients_of_step(engine, tokens=None):
    """Forward and backward of each micro-batch; of the first batch if none is given."""
    tokens = token_batches(1)[0] if tokens is None else tokens
    comm, micro_batches = engine.comm, len(tokens)
    for i, rows in enumerate(tokens):
        mine = own_rows(comm, rows).to(comm.device)
        with engine.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
            engine.backward(engine.forward(mine, mine) / micro_batches)


# --- models that are not a plain stack -------------------------------------------------------------------------------

WIDTH = 10


class Unused(nn.Module):
    """One layer that nobody uses, and one that only the rank with the first rows uses, or all do."""

    def __init__(self, by_all):
        super().__init__()
        self.first, self.idle, self.some = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_all = by_all

    def forward(self, x):
        y = self.first(x)
        return y + self.some(y) if self.by_all or x[0, 0] > 0 else y


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self[2].requires_grad_(False)
        self[4].bias.requires_grad_(False)


class Twice(nn.Module):
    """A layer used twice, a weight of two layers, and a parameter of the module itself."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.two(self.one(self.one(x).tanh()).tanh()) * self.scale


class Recomputed(nn.Module):
    """Blocks in a region of recomputation, in another one."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), reentrant

    def part(self, x, first):
        for block in self.blocks[first : first + 2]:
            x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=self.reentrant)
        return x

    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        for first in (0, 2):
            x = checkpoint(self.part, x, first, use_reentrant=self.reentrant)
        return x


class Layers(nn.ModuleList):
    """A stack."""

    def __init__(self, count, width=WIDTH):
        super().__init__(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for layer in self:
            x = layer(x).tanh()
        return x


def three_layers(seed=0):
    fixed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
                         nn.Linear(WIDTH, WIDTH))


def three_layer_engine(comm, stage, seed=0, **options):
    """An engine of three layers, in several buckets."""
    return ENGINES[stage](three_layers(seed), comm, FAST, bucket_bytes=500, **options)


MODELS = {
    "unused": functools.partial(Unused, True), "unused on a rank": functools.partial(Unused, False),
    "frozen": Frozen, "twice": Twice, "layers": functools.partial(Layers, 4),
    "recomputed": functools.partial(Recomputed, False), "recomputed, reentrant": functools.partial(Recomputed, True),
    "one small tensor": lambda: nn.Linear(1, 1, bias=False)}


def model_of(name):
    fixed()
    return MODELS[name]()


def batch(step, width=WIDTH, rows=4):
    """(rows, width)."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
    x[:, 0] = torch.linspace(1, -1, rows)  # what `Unused` asks for
    return x


def rows_of(comm, step, **sizes):
    """This rank's part of a batch."""
    return own_rows(comm, batch(step, **sizes))


def square(engine, x):
    """A loss."""
    return engine(x).square().mean()


# --- a store ---------------------------------------------------------------------------------------------------------


class Elsewhere:
    """A store that keeps contents as Python bytes, and notes what it was asked."""

    def __init__(self):
        self.tensors, self.contents, self.asked = {}, {}, []

    def put(self, key, tensors, changed=True):
        self.asked.append(("put", key))
        if changed or key not in self.contents:
            self.contents[key] = [bytes(x.detach().reshape(-1).view(torch.uint8).tolist()) for x in tensors]
        self.tensors[key] = tensors
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def prefetch(self, key):
        self.asked.append(("prefetch", key))

    def drop(self, key):
        self.asked.append(("drop", key))
        self.tensors.pop(key, None), self.contents.pop(key, None)

    def get(self, key):
        self.asked.append(("get", key))
        content_of = self.contents[key] if key in self.tensors else ()
        for tensor, content in zip(self.tensors.pop(key, ()), content_of, strict=True):
            tensor.untyped_storage().resize_(len(content))
            if content:
                tensor.detach().view(-1).copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype))
