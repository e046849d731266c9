"""The attention that ranks compute unless they are given another is attention by its definition."""

import itertools

import pytest
import torch

from refimpl.attention import Softcap, reference_attention
from refimpl.context.dense import dense_attention


@pytest.mark.parametrize(("causal", "window", "softcap", "sinks"), itertools.product(
    [True, False], [None, 0, 2], [None, 1.5], [False, True]))
def test_its_output_and_gradients_are_those_of_the_definition(causal, window, softcap, sinks):
    torch.manual_seed(0)
    shapes = (2, 6, 5, 4), (2, 3, 9 if causal else 5, 4), (2, 3, 9 if causal else 5, 4), (6,)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options, score = {"causal": causal, "window": window}, None if softcap is None else Softcap(softcap)
    outs = [dense_attention(*given[:3], **options, softcap=softcap, sinks=given[3] if sinks else None),
            reference_attention(*given[:3], **options, score=score, sinks=given[3] if sinks else None)]
    found, expected = (torch.autograd.grad(out.square().sum(), given, allow_unused=True) for out in outs)
    assert torch.allclose(*outs, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.allclose(one, other, rtol=1e-10, atol=1e-12))
