"""What tests of several dimensions share: tiny models, real text, and one process to compare with."""

import functools

import torch
from outside.models import GROUPED, causal

from refimpl.data import TextData
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
ROWS, T, MAX_NORM = 8, 32, 0.5
GPTS = {"gpt": GPTConfig(vocab_size=256, context_length=T, layers=4, hidden=32, heads=4),
        "grouped gpt": GPTConfig(vocab_size=256, context_length=T, layers=4, hidden=32, heads=4, kv_heads=2,
                                 head_dim=12, positions="rotary", norm="rmsnorm", activation="geglu", bias=False,
                                 qkv_bias=True, post_norms=True, mlp_hidden=54, tied=False)}
OTHERS = {"llama": causal("llama", **GROUPED | {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}),
          "tied llama": causal("llama", **GROUPED | {"num_hidden_layers": 4, "hidden_size": 32,
                                                     "intermediate_size": 64, "tie_word_embeddings": True})}


def built(name, seed=0):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return GPT(GPTS[name]) if name in GPTS else OTHERS[name]()


def batches(steps, rank=0, ranks=1):
    every = TextData().batches(ROWS // ranks, T, rank=rank, world_size=ranks)
    return [next(every) for _ in range(steps)]


def uneven(given, rank=0, ranks=1):
    """Batches of which some targets do not count: none of the last quarter of the rows does, and few of the first."""
    found = []
    for tokens, targets in given:
        rows = torch.arange(ROWS).chunk(ranks)[rank][:, None]
        gone = (rows >= ROWS * 3 // 4) | (rows < 2) & (torch.arange(T) % 5 > 0)
        found.append((tokens, targets.masked_fill(gone, -100)))
    return found


def alone(name, steps, cut=None):
    """(losses, norms, model) of one process."""
    model, found = built(name), []
    optimizer = ADAMW(model.parameters())
    for tokens, targets in cut(batches(steps)) if cut else batches(steps):
        if name in GPTS:
            loss = model(tokens, targets)
        else:
            loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found, model


def engine_of(comm, name, axes, seed=0, **options):
    mesh = Mesh(**axes).connect(comm)
    return together(built(name, seed), mesh, ADAMW, **options)


def run(engine, steps, first=0):
    """[(loss, norm)] of these steps."""
    return run_on(engine, batches(first + steps, engine.mesh.here["dp"], engine.mesh.dp)[first:])


def run_on(engine, given):
    found = []
    for tokens, targets in given:
        loss = engine.train_step(tokens, targets)
        norm = engine.clip_grad_norm_(MAX_NORM)
        engine.step()
        found.append((loss.item(), norm.item()))
    return found


def trained(comm, name, axes, steps, options, cut=None, mutant=None):
    engine = engine_of(comm, name, axes, **options)
    if mutant is not None:
        mutant(engine)
    at = engine.mesh.here["dp"], engine.mesh.dp
    given = batches(steps, *at)
    return run_on(engine, cut(given, *at) if cut else given)


def differing(mine, saved):
    """What is not bit-equal in two state_dicts."""
    found = []
    for kind in ("model", "optimizer"):
        found += [key for key in {**mine[kind], **saved[kind]} if key not in mine[kind] or key not in saved[kind]]
    found += [key for key, x in mine["model"].items() if not torch.equal(x, saved["model"].get(key, x + 1))]
    for key, states in mine["optimizer"].items():
        found += [f"{key} {kind}" for kind, x in states.items()
                  if not torch.equal(torch.as_tensor(x), torch.as_tensor(saved["optimizer"][key][kind]))]
    return found + ["step"] * (mine["step"] != saved["step"]) + ["groups"] * (groups_of(mine) != groups_of(saved))


def groups_of(sd):
    """The param groups; the order of names in one says nothing."""
    return [{**group, "params": sorted(group["params"])} for group in sd["param_groups"]]


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
        unequal.append(differing(mine, saved) if (mine := engine.engine.state_dict()) else [])
        losses.append(run(engine, 2, trained_steps))
    return unequal, losses, saved
