"""What tests of several dimensions share: tiny models, real text, and one process to compare with."""

import functools

import saving_kit
import torch
from families import GEMMA
from outside.models import GROUPED, causal

from refimpl.data import TextData
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
ROWS, T, MAX_NORM = 8, 32, 0.5
GPTS = {"gpt": GPTConfig(vocab_size=256, context_length=T, layers=4, hidden=32, heads=4),
        "six heads": GPTConfig(vocab_size=256, context_length=T, layers=4, hidden=48, heads=6),
        "grouped gpt": GPTConfig(vocab_size=256, context_length=T, layers=4, hidden=32, heads=4, mlp_hidden=54,
                                 qkv_bias=True, **GEMMA)}
OTHERS = {"llama": causal("llama", **GROUPED | {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}),
          "tied llama": causal("llama", **GROUPED | {"num_hidden_layers": 4, "hidden_size": 32,
                                                     "intermediate_size": 64, "tie_word_embeddings": True})}


FP64 = " in fp64"  # where rounding would grow: AdamW's first steps are as large for a small gradient as for a large one


def built(name, seed=0):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if name.endswith(FP64):
        return built(name.removesuffix(FP64), seed).double()
    return GPT(GPTS[name]) if name in GPTS else OTHERS[name]()


def batches(steps, rank=0, ranks=1):
    every = TextData().batches(ROWS // ranks, T, rank=rank, world_size=ranks)
    return [next(every) for _ in range(steps)]


def batches_of(engine, steps):
    """What this rank of a mesh is given."""
    return batches(steps, engine.mesh.here["dp"], engine.mesh.dp)


def uneven(given, rank=0, ranks=1):
    """Batches of which some targets do not count: none of the last quarter of the rows does, and few of the first."""
    found = []
    for tokens, targets in given:
        rows = torch.arange(ROWS).chunk(ranks)[rank][:, None]
        gone = (rows >= ROWS * 3 // 4) | (rows < 2) & (torch.arange(T) % 5 > 0)
        found.append((tokens, targets.masked_fill(gone, -100)))
    return found


def even(given, rank=0, ranks=1):
    return given


def alone(name, steps, cut=even):
    """[(loss, norm)] of one process."""
    model, found = built(name), []
    optimizer = ADAMW(model.parameters())
    for tokens, targets in cut(batches(steps)):
        if isinstance(model, GPT):
            loss = model(tokens, targets)
        else:
            loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def engine_of(comm, name, axes, seed=0, **options):
    return together(built(name, seed), Mesh(**axes).connect(comm), ADAMW, **options)


def run(engine, steps, first=0):
    """[(loss, norm)] of these steps."""
    return run_on(engine, batches_of(engine, first + steps)[first:])


def run_on(engine, given):
    found = []
    for tokens, targets in given:
        loss = engine.train_step(tokens, targets)
        norm = engine.clip_grad_norm_(MAX_NORM)
        engine.step()
        found.append((loss.item(), norm.item()))
    return found


def trained(comm, name, axes, steps, options, cut=even, mutant=None):
    engine = engine_of(comm, name, axes, **options)
    if mutant is not None:
        mutant(engine)
    return run_on(engine, cut(batches_of(engine, steps), engine.mesh.here["dp"], engine.mesh.dp))


def differing(mine, saved):
    """What is not bit-equal in two state_dicts, if there are two; the order of names in a param group says nothing."""
    return saving_kit.differing(*(sd and {**sd, "param_groups": [
        {**group, "params": sorted(group["params"])} for group in sd["param_groups"]]} for sd in (mine, saved)))


def exchanged(comm, name, meshes, folder, trained_steps=2):
    """Save under the first of these (axes, options), load under the others, train on under each. On rank 0 [what is not
    equal], [losses after it], and the state_dict."""
    (axes, options), *others = meshes
    engine = engine_of(comm, name, axes, **options)
    run(engine, trained_steps)
    engine.save(folder / "state")
    engine.save_weights(folder / "model.safetensors", None)
    saved = engine.engine.state_dict()
    unequal, losses = [], [run(engine, 2, trained_steps)]
    for axes, options in others:
        engine = engine_of(comm, name, axes, seed=7, **options)
        engine.load(folder / "state")
        unequal.append(differing(engine.engine.state_dict(), saved))
        losses.append(run(engine, 2, trained_steps))
    return unequal, losses, saved
