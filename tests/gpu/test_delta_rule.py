"""The gated delta rule on a CUDA device: as exact as the definition, and the bytes of the closed forms."""

import functools

import delta_rule_kit as kit
import pytest
import torch

from refimpl.attention.linear.delta_rule import delta_rule_bytes, gated_delta_rule


def on(device, given, upstream):
    return [x if x is None else x.detach().to(device).requires_grad_() for x in given], [x.to(device) for x in upstream]


@pytest.mark.parametrize("kernel", ["triton", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 200, 64, 64), (1, 2, 4, 130, 128, 128), (1, 1, 3, 70, 40, 24)], ids=str)
def test_as_exact_as_the_definition(sizes, dtype, kernel, cuda):
    rule = functools.partial(gated_delta_rule, kernel=kernel, return_state=True)
    given, upstream = on(cuda, *kit.inputs(*sizes, dtype=dtype))
    kit.check_as_exact(rule, given, upstream)
    kit.check_as_exact(rule, given, upstream, delta=False)


@pytest.mark.bytes
@pytest.mark.parametrize("kernel", ["triton", "tiled"])
@pytest.mark.parametrize("heads", [(4, 4), (2, 4)], ids=str)
def test_bytes_are_the_closed_forms(heads, kernel, cuda):
    rule = functools.partial(gated_delta_rule, kernel=kernel)
    given, upstream = on(cuda, *kit.inputs(2, *heads, 1500, 64, 128, torch.bfloat16, state=False))
    kit.gradients(functools.partial(rule, return_state=True), given, upstream)  # compiles
    shapes = (2, heads[0], 1500, 64), (2, heads[1], 1500, 128)
    assert kit.read(rule, given, upstream) == delta_rule_bytes(*shapes, torch.bfloat16, kernel=kernel)
