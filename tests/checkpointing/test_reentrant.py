"""The first step of the story: it saves as much, and here is where it breaks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.checkpointing import checkpoint, reentrant_checkpoint


def chain(x, w):
    for _ in range(4):
        x = (x @ w).tanh()
    return x


def test_right_gradients_from_the_inputs_alone(pair):
    expected = torch.autograd.grad(chain(*pair).sum(), pair)
    with memory.track(*pair) as t:
        y = reentrant_checkpoint(chain, *pair)
    assert t.now.total - t.start.total == y.nbytes
    y.sum().backward()
    assert all(torch.equal(x.grad, e) for x, e in zip(pair, expected, strict=True))


def test_it_knows_no_keywords(pair):
    with pytest.raises(TypeError):
        reentrant_checkpoint(chain, pair[0], w=pair[1])
    checkpoint(chain, pair[0], w=pair[1]).sum().backward()


def test_parameters_get_nothing_where_no_input_asks():
    table, tokens = nn.Embedding(8, 4), torch.tensor([1, 2])
    assert checkpoint(table, tokens).requires_grad and not reentrant_checkpoint(table, tokens).requires_grad


def test_tensors_in_a_list_are_not_seen(pair):
    assert not reentrant_checkpoint(lambda both: chain(*both), pair).requires_grad


def test_gradients_go_to_parameters_and_to_nobody_who_asks(x, w):
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(reentrant_checkpoint(lambda x: chain(x, w), x).sum(), w)
    torch.autograd.grad(checkpoint(lambda x: chain(x, w), x).sum(), w)


def test_no_second_derivatives(x):
    def slope(how):
        return torch.autograd.grad(how(lambda x: x.sin(), x).sum(), x, create_graph=True)[0]
    assert slope(checkpoint).requires_grad and not slope(reentrant_checkpoint).requires_grad


def test_other_random_numbers_the_second_time(x):
    def run(how):
        torch.manual_seed(0)
        return torch.autograd.grad(how(lambda x: F.dropout(x, 0.5) * 2, x).sum(), x)[0]
    assert torch.equal(run(checkpoint), run(lambda fn, x: fn(x)))
    torch.manual_seed(0)
    y = reentrant_checkpoint(lambda x: F.dropout(x, 0.5) * 2, x)
    y.sum().backward()
    assert not torch.equal(x.grad != 0, y != 0), "it would have been right by luck"


def test_the_whole_region_stays_until_it_is_through():
    """Backward of the outer graph cannot free what the inner one holds; placeholders let go one by one."""
    x = torch.randn(1000, requires_grad=True)
    def peak(how):
        with memory.track(x) as t:
            how(lambda x: x.sin().sin().sin().sin(), x).sum().backward()
        return t.peak.total - t.start.total
    assert peak(checkpoint) < peak(reentrant_checkpoint)
