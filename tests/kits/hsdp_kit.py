"""What the tests of hybrid sharding share: a mesh's two levels, engines on them, and one process to compare with."""

from torch import nn
from zero_kit import ENGINES, FAST, batch, copied, rows_of, square, three_layers

from refimpl.mesh import Mesh
from refimpl.zero import Zero2
from refimpl.zero.internals.norms import clip_

STAGES, STEPS = (1, 2, 3), 4


def levels(comm, shards=2):
    """(the data-parallel communicator, the engine's arguments) of a mesh on all ranks."""
    mesh = Mesh(dp=comm.world_size, shards=shards).connect(comm)
    return mesh.get_parallel_group("dp"), {kind: mesh.get_parallel_group(kind) for kind in ("shards", "replicas")}


def hybrid(make, model, comm, shards=2, **options):
    """An engine on both levels, without `shards` on one. `make`: its class, or its stage."""
    make = ENGINES[make] if isinstance(make, int) else make
    dp, both = levels(comm, shards) if shards else (comm, {})
    return make(model, dp, FAST, **both, **options)


def step_of(engine, step):
    """The norm, clipped to 0.05, of one step of two micro-batches."""
    x = rows_of(engine.comm, step, rows=16).to(engine.buckets[0].dtype)
    with engine.no_sync():
        engine.backward(square(engine, x[::2]) / 2)
    engine.backward(square(engine, x[1::2]) / 2)
    norm = engine.clip_grad_norm_(0.05).item()
    engine.step()
    return norm


def alone(dtype):
    model = three_layers().to(dtype)
    optimizer, norms = FAST(model.parameters()), []
    for step in range(STEPS):
        model(batch(step, rows=16).to(dtype)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        norm = nn.utils.get_total_norm(gradients)
        clip_(gradients, norm, 0.05)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, copied(model)


class WithoutReplicas(Zero2):
    """Reduces within its group alone: each group trains a model of its own."""
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reducer.replicas = None
