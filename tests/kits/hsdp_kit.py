"""What the tests of hybrid sharding share: a mesh's two levels, engines on them, and one process to compare with."""

from torch import nn
from zero_kit import ENGINES, FAST, batch, rows_of, square, three_layers

from refimpl.mesh import Mesh
from refimpl.zero import Zero2
from refimpl.zero.internals.norms import clip_

STAGES = (1, 2, 3)
STEPS = 4


def levels(comm, shards=2, **sizes):
    """(the data-parallel communicator, the engine's arguments) of a mesh on all ranks."""
    mesh = Mesh(dp=comm.world_size // Mesh(**sizes).world_size, shards=shards, **sizes).connect(comm)
    return mesh.get_parallel_group("dp"), {"shards": mesh.get_parallel_group("shards"),
                                           "replicas": mesh.get_parallel_group("replicas")}


def hybrid(stage, model, comm, *args, shards=2, **options):
    dp, both = levels(comm, shards)
    return ENGINES[stage](model, dp, *args, **both, **options)


def step_of(engine, step):
    """The norm, clipped to 0.05, of one step of two micro-batches."""
    x = rows_of(engine.comm, step, rows=16).to(engine.buckets[0].dtype)
    with engine.no_sync():
        engine.backward(square(engine, x[::2]) / 2)
    engine.backward(square(engine, x[1::2]) / 2)
    norm = engine.clip_grad_norm_(0.05).item()
    engine.step()
    return norm


def alone(dtype, steps=STEPS):
    model = three_layers().to(dtype)
    optimizer, norms = FAST(model.parameters()), []
    for step in range(steps):
        model(batch(step, rows=16).to(dtype)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        norm = nn.utils.get_total_norm(gradients).float()  # engines send fp64, and return fp32
        clip_(gradients, norm, 0.05)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


class WithoutReplicas(Zero2):
    """Reduces within its group alone: each group trains a model of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reducer.replicas = None
