"""What tests of saving split models share: four meshes, a step on each, and what is saved on one and loaded on another.

A mesh is the number of its tensor-parallel ranks, of 4 ranks in all; `ALONE` is one process, on rank 0.
"""

import torch
from saving_kit import differing
from tensor_kit import tokens_of, whole
from torch import nn
from zero_kit import ADAMW, ENGINES

from refimpl.comm import FakeCommunicator
from refimpl.mesh import Mesh
from refimpl.model import GPT
from refimpl.tensor import tensor_parallel
from refimpl.zero.closed_forms import saved_bytes

ALONE = 0
MESHES = (2, 4, 1, ALONE)
BUCKET = 20000  # bytes: parts of one layer are in several buckets, and the embedding is beside what is on all ranks
MAX_NORM = 0.3


class Meshes:
    """The meshes of these ranks, each connected once."""

    def __init__(self, comm):
        self.comm, self.made = comm, {tp: Mesh(dp=comm.world_size // tp, tp=tp).connect(comm) for tp in MESHES if tp}

    def model(self, name, tp, dtype=torch.float64, seed=0):
        model = built(name, dtype, seed)
        return tensor_parallel(model, self.made[tp].get_parallel_group("tp")) if tp > 1 else model

    def engine(self, name, tp, stage, dtype=torch.float64, seed=0):
        """An engine on this mesh; None where this rank has no part of it."""
        if tp == ALONE and self.comm.rank:
            return None
        dp, world = ((self.made[tp].get_parallel_group("dp"), self.comm) if tp else (FakeCommunicator(0, 1),) * 2)
        return ENGINES[stage](self.model(name, tp, dtype, seed), dp, ADAMW, world=world, **options(stage))

    def file_bytes(self, name, tp, stage, directory):
        """Bytes of the file of this rank, as written and as predicted."""
        if tp == ALONE and self.comm.rank:
            return 0, 0
        ranks = self.made[tp].ranks("dp") if tp else [0]
        predicted = saved_bytes(self.model(name, tp), len(ranks), stage, ranks=ranks, **options(stage))
        file = f"rank-{self.comm.rank:05d}.safetensors"
        written, = directory.glob(f"*/{file}")
        return written.stat().st_size, predicted[file]


def built(name, dtype=torch.float64, seed=0):
    """A model that nobody has split, of which the fused layer of one attention is not trained."""
    model = whole(name, dtype, seed)
    if name == "grouped gpt":
        model.blocks[0].attention.qkv.requires_grad_(False)
    return model


def loss_of(model, tokens, call):
    """The loss of a next token; of a model of Hugging Face, which scores in fp32, here in its own dtype."""
    targets = tokens.roll(-1, 1)
    if isinstance(model, GPT):
        return call(tokens, targets)
    return nn.functional.cross_entropy(call(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def options(stage):
    return {"bucket_bytes": BUCKET} if stage < 3 else {}


def losses(engine, steps, max_norm=None):
    """The losses of these steps, of the whole batch, clipped or not."""
    found = []
    for step in steps if engine else ():
        tokens = tokens_of(engine.model, 4, 8, step).chunk(engine.comm.world_size)[engine.comm.rank]
        loss = loss_of(engine.model, tokens, engine)
        engine.backward(loss)
        if max_norm is not None:
            assert engine.clip_grad_norm_(max_norm) > max_norm
        engine.step()
        found.append(engine.comm.all_reduce(loss.detach().double(), "avg").item())
    return found


def plainly(name, sd, steps, dtype=torch.float64):
    """The losses of the unsplit model, without an engine, that goes on from a consolidated state."""
    model = built(name, dtype, seed=7)
    model.load_state_dict(sd["model"], strict=True)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer, found = ADAMW(named.values()), []
    assert set(sd["optimizer"]) == set(named) == set(sd["param_groups"][0]["params"])
    for key, state in sd["optimizer"].items():
        optimizer.state[named[key]] = {kind: x.clone() for kind, x in state.items()}
    for step in steps:
        loss = loss_of(model, tokens_of(model, 4, 8, step), model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def exchanged(comm, name, turn, folder):
    """Save under each mesh, load under each. On each rank {mesh: its files' bytes}; on rank 0 also what is not equal,
    {(saved, loaded): names}, how far the losses of two more steps are, and the state_dicts."""
    meshes, saved, sizes, unequal, far = Meshes(comm), {}, {}, {}, {}
    for i, tp in enumerate(MESHES):
        stage = (i + turn) % 4
        engine = meshes.engine(name, tp, stage)
        losses(engine, range(2), MAX_NORM)
        saved[tp] = engine.state_dict() if engine else {}
        if engine:
            engine.save(folder / str(tp))
            engine.save_weights(folder / str(tp) / "model.safetensors", None)
        comm.barrier()
        sizes[tp] = meshes.file_bytes(name, tp, stage, folder / str(tp))
    expected = {tp: plainly(name, sd, (2, 3)) for tp, sd in saved.items() if sd}
    for i, tp in enumerate(MESHES):
        engine = meshes.engine(name, tp, (turn + 3 - i) % 4, seed=7)
        for j, source in enumerate(MESHES):
            if engine:
                engine.load(folder / str(source)) if (i + j) % 2 else engine.load_state_dict(saved[source])
                unequal[source, tp] = differing(engine.state_dict(), saved[source])
            found = losses(engine, (2, 3))
            if not comm.rank:
                far[source, tp] = max(abs(a - b) for a, b in zip(found, expected[source], strict=True))
            comm.barrier()
    return sizes, unequal, far, saved


def exchanged_with_replicas(comm, name, stage, folder):
    """What is not equal after a save in hybrid sharding, each shard on two ranks, and loads without it."""
    meshes, mesh = Meshes(comm), Mesh(dp=2, tp=2, shards=1).connect(comm)
    dp, shards, replicas = map(mesh.get_parallel_group, ("dp", "shards", "replicas"))
    engine = ENGINES[stage](meshes.model(name, 2), dp, ADAMW, world=comm, shards=shards, replicas=replicas)
    losses(engine, range(2), MAX_NORM)
    engine.save(folder)
    unequal, saved = [], engine.state_dict()
    for tp in (2, 4):
        other = meshes.engine(name, tp, stage, seed=7)
        other.load(folder)
        unequal += differing(other.state_dict(), saved)
    engine.load_state_dict(saved)
    return unequal + differing(engine.state_dict(), saved), len(saved)


def exchanged_in_16_bits(comm, name, stages, folder):
    """What is not equal, to the bit, after a save on each mesh of tensor parallelism and a load on the others; and
    which dtypes were saved."""
    meshes, unequal, saved = Meshes(comm), [], {}
    for tp, stage in stages.items():
        engine = meshes.engine(name, tp, stage, torch.bfloat16)
        losses(engine, range(2), MAX_NORM)
        engine.save(folder / str(tp))
        saved[tp] = engine.state_dict()
        for other, its in stages.items():
            loaded = meshes.engine(name, other, its, torch.bfloat16, 7)
            loaded.load(folder / str(tp))
            unequal += differing(loaded.state_dict(), saved[tp])
            before, after = (losses(each, (2,)) for each in (engine, loaded)) if other == tp else (0, 0)
            unequal += [(tp, before, after)] if before != after else []
    kept = [x for sd in saved.values() if sd for key in sd["optimizer"]
            for x in (sd["model"][key], sd["optimizer"][key]["exp_avg"])]
    return unequal, {x.dtype for x in kept}


