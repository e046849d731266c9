"""torch.compile of a split model: what goes between ranks is left out of its graphs, and gradients are the same."""

import copy

import pytest
import torch
from rank_pool import pooled
from tensor_kit import SPLITS, block_of, tokens_of, whole

from refimpl.parallel import SequenceParallelAttention, context_parallel

METHODS = ("ring", "gathered", "ulysses")


def square(model, tokens):
    return model(tokens).square().mean()


def distance(comm, split):
    """Return the largest difference of gradients from the unsplit model, which is not compiled."""
    torch._dynamo.reset()
    model = whole("gpt")
    reference, tokens = copy.deepcopy(model), tokens_of(model, 2, 16)
    square(reference, tokens).backward()
    wanted, mine = {key: p.grad for key, p in reference.named_parameters()}, tokens
    if split in METHODS:
        attention = SequenceParallelAttention(comm, split)
        context_parallel(model, attention)
        mine = attention.shard(tokens)
    else:
        SPLITS[split](model, comm)
    square(torch.compile(model, backend="eager"), mine).backward()
    if split in METHODS:
        return max((comm.all_reduce(p.grad, "avg") - wanted[key]).abs().max().item()
                   for key, p in model.named_parameters())
    return max((p.grad - block_of(wanted[p.shard_spec.name], p.shard_spec)).abs().max().item()
               for p in model.parameters())


@pytest.mark.parametrize("split", [*SPLITS, *METHODS])
def test_a_compiled_model_is_the_same(split):
    assert max(pooled(distance, 2, split)) <= 1e-12
