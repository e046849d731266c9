"""Losses without gradients: those of the whole model in eval mode, of each schedule, and nothing is kept."""

import pytest
import torch
from outside.models import GROUPED, causal
from rank_pool import pooled
from together_kit import ADAMW

from refimpl import memory
from refimpl.comm import simulate
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.pipeline import pipeline
from refimpl.pipeline.named_schedules import BUILDERS

SIZES = {"vocab_size": 61, "context_length": 16, "layers": 8, "hidden": 16, "heads": 4}


def whole(**options):
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, **options), dtype=torch.float64)


def batch(rows=9):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(61, (rows, 8), generator=generator) for _ in range(2))
    targets[0, :5] = -100
    return tokens, targets


def evaluated(comm, name, m):
    model, (tokens, targets) = whole(dropout=0.3), batch()
    expected = model.eval()(tokens, targets).item()
    pipe = pipeline(model.train(), comm, name, m)
    pipe.train_step(tokens, targets)
    before = [p.grad.clone() for p in pipe.parameters()]
    found = [pipe.evaluate(tokens, targets) for _ in range(2)]
    assert all(torch.equal(a, p.grad) for a, p in zip(before, pipe.parameters(), strict=True))
    assert all(module.training for stage in pipe.stages.values() for module in stage.modules())
    pipe.train_step(tokens, targets)
    return [None if x is None else (x.requires_grad, abs(x.item() - expected)) for x in found]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_loss_of_the_whole_model(name, ranks):
    if name in ("dualpipe-v", "zb-v", "interleaved") and ranks * 2 > SIZES["layers"]:
        pytest.skip("more stages than layers")
    m = 2 * ranks if name in ("dualpipe-v", "interleaved") else 4
    found = [each for mine in simulate(evaluated, ranks, name, m) for each in mine if each is not None]
    assert len(found) == 2 and all(not graph and far < 1e-6 for graph, far in found)


def kept(comm):
    pipe, (tokens, targets) = pipeline(whole(), comm, "1f1b", 3), batch()
    with memory.track(*pipe.stages.values()) as t:
        loss = pipe.evaluate(tokens, targets)
    with memory.track(*pipe.stages.values()) as training:
        pipe.train_step(tokens, targets)
    rest = t.now.total - t.start.total - (0 if loss is None else loss.nbytes)
    return rest, t.peak.total - t.start.total, training.peak.total - training.start.total


def test_forwards_keep_nothing():
    for rest, peak, training in pooled(kept, 3):
        assert rest == 0 and peak < training / 2


def of_a_mesh(comm, name, axes, options):
    torch.manual_seed(0)
    model = whole() if name == "gpt" else causal("llama", **GROUPED | {"num_hidden_layers": 4, "vocab_size": 61})()
    tokens, targets = batch(8)
    targets[0, :5] = targets[1, :5]  # as many on each rank
    with torch.no_grad():
        expected = model(tokens, targets) if name == "gpt" else torch.nn.functional.cross_entropy(
            model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    engine = together(model, Mesh(**axes).connect(comm), ADAMW, **options)
    at, n = engine.mesh.here["dp"], engine.mesh.dp
    mine = tokens[at * 8 // n:(at + 1) * 8 // n], targets[at * 8 // n:(at + 1) * 8 // n]
    found = engine.evaluate(*mine)
    trained = engine.train_step(*mine)
    return abs(found.item() - expected.item()), abs(trained.item() - expected.item())


@pytest.mark.parametrize(("name", "axes", "options"), [
    ("gpt", {"pp": 2, "dp": 2}, {"micro_batches": 2}), ("gpt", {"tp": 2, "pp": 2, "cp": 2}, {"micro_batches": 2}),
    ("gpt", {"dp": 2}, {"zero": 3}), ("llama", {"pp": 3}, {"micro_batches": 3}),
    ("llama", {"cp": 2, "tp": 2}, {"zero": 3})])
def test_of_meshes(name, axes, options):
    for evaluated_far, trained_far in simulate(of_a_mesh, Mesh(**axes).world_size, name, axes, options):
        assert evaluated_far < 1e-5 and trained_far < 1e-5
