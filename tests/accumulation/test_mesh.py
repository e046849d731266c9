"""A batch that is cut along its rows and its sequence, dp × cp: the mean over all tokens, wherever they are."""

import functools

import pytest
import torch
from ragged_kit import ragged
from rank_pool import pooled
from torch import nn
from torch.nn import functional as F
from zero_kit import ENGINES, copied, farthest, fixed, parameters_of

from refimpl.accumulation import accumulate
from refimpl.mesh import Mesh
from refimpl.zero import DataParallel, Zero3

ROWS, TOKENS, VOCABULARY = 6, 8, 23
LENGTHS = [8, 1, 5, 7, 2, 3]  # targets of each row: dp × cp ranks have 9, 5, 9 and 3
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Tokenwise(nn.Module):
    """Embedding, MLP and head: no token sees another, so that a rank needs its part of the sequence alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 12)
        self.down, self.head = nn.Linear(12, 6), nn.Linear(6, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        return F.cross_entropy(self.head(x + self.down(self.up(x).tanh())).flatten(0, 1), targets.flatten())


def model():
    fixed()
    return Tokenwise().double()


def batch(step):
    numbers = torch.Generator().manual_seed(step)
    return ragged(*torch.randint(0, VOCABULARY, (2, ROWS, TOKENS), generator=numbers), LENGTHS)


def part(mesh, step):
    """The rows of this rank's place on dp, and of these the tokens of its place on cp."""
    return [x.chunk(mesh.dp)[mesh.here["dp"]].chunk(mesh.cp, 1)[mesh.here["cp"]] for x in batch(step)]


@functools.cache
def alone():
    one = model()
    optimizer, losses = ADAMW(one.parameters()), []
    for step in range(3):
        loss = one(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copied(one)


def trained(comm, make, kinds=("dp", "cp"), micro_batch=2, shards=None):
    """(losses, parameters) of an engine on a kind of group of Mesh(dp=2, cp=2)."""
    mesh = Mesh(dp=2, cp=2).connect(comm)
    levels = {} if shards is None else {"shards": mesh.get_parallel_group("cp"),
                                        "replicas": mesh.get_parallel_group("dp")}
    engine, losses = make(model(), mesh.get_parallel_group(*kinds), ADAMW, bucket_bytes=1000, **levels), []
    for step in range(3):
        losses.append(accumulate(engine, *part(mesh, step), micro_batch=micro_batch).item())
        engine.step()
    return losses, parameters_of(engine)


def mean_of_means(comm):
    """What DDP's average gives: each rank's mean counts alike, however few tokens it has."""
    mesh = Mesh(dp=2, cp=2).connect(comm)
    engine = DataParallel(model(), mesh.get_parallel_group("dp", "cp"), ADAMW)
    for step in range(3):
        engine.backward(engine.forward(*part(mesh, step)))
        engine.step()
    return [], parameters_of(engine)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("make", ENGINES)
def test_the_gradient_is_that_of_all_tokens(make, micro_batch):
    losses, expected = alone()
    for said, ours in pooled(trained, 4, make, ("dp", "cp"), micro_batch):
        assert said == pytest.approx(losses, rel=1e-6) and farthest(ours, expected) < 1e-12


def test_shards_may_be_those_of_context_parallelism():
    losses, expected = alone()
    for said, ours in pooled(trained, 4, Zero3, ("dp", "cp"), 2, "cp"):
        assert said == pytest.approx(losses, rel=1e-6) and farthest(ours, expected) < 1e-12


@pytest.mark.parametrize("wrong", [functools.partial(trained, make=DataParallel, kinds=("dp",)), mean_of_means],
                         ids=["dp alone", "mean of means"])
def test_versions_that_forget_cp_or_the_counts_are_seen(wrong):
    _, expected = alone()
    assert min(farthest(ours, expected) for _, ours in pooled(wrong, 4)) > 1e-4
