"""torch.compile of a split model: what goes between ranks is left out of its graphs, and gradients are the same."""

import copy

import pytest
import torch
from rank_pool import on_ranks
from tensor_kit import SPLITS, farthest, tokens_of, whole

from refimpl.context import SequenceParallelAttention, context_parallel

METHODS = ("ring", "gathered", "ulysses")


@pytest.mark.parametrize("split", [*SPLITS, *METHODS])
@on_ranks(2)
def test_a_compiled_model_is_the_same(comm, split):
    """As the unsplit model, which is not compiled."""
    torch._dynamo.reset()
    model = whole("gpt")
    reference, tokens = copy.deepcopy(model), tokens_of(model, 2, 16)
    reference(tokens).square().mean().backward()
    if split in METHODS:
        attention = SequenceParallelAttention(comm, split)
        context_parallel(model, attention)
        tokens = attention.shard(tokens)
    else:
        SPLITS[split](model, comm)
    torch.compile(model, backend="eager")(tokens).square().mean().backward()
    if split in METHODS:
        for p, whole_p in zip(model.parameters(), reference.parameters(), strict=True):
            assert (comm.all_reduce(p.grad, "avg") - whole_p.grad).abs().max() <= 1e-12
    else:
        assert farthest(model.parameters(), reference) <= 1e-12
