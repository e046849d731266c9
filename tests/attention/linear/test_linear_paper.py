"""The paper in code: three forms that are equal, and the hardened version is the third."""

import math

import delta_rule_kit as kit
import pytest
import torch
from one_screen import check_paper

from refimpl import memory
from refimpl.attention.linear.delta_rule import gated_delta_rule
from refimpl.papers import linear_attention as paper

EQUAL = {"rtol": 1e-10, "atol": 1e-10}


def given(**sizes):
    """q, k and v of as many heads."""
    return kit.inputs(G=4, **sizes)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("C", [1, 7, 16, 64])
def test_three_forms_are_equal_forward_and_backward(C, delta):
    (*tensors, _), (gradient, _) = given()
    forms = [paper.recurrent(*tensors, delta=delta)[0], paper.parallel(*tensors, delta=delta),
             paper.chunked(*tensors, C=C, delta=delta)[0]]
    all_gradients = [torch.autograd.grad(out, tensors, gradient) for out in forms]
    for out, gradients in zip(forms[1:], all_gradients[1:], strict=True):
        torch.testing.assert_close(out, forms[0], **EQUAL)
        for x, y in zip(gradients, all_gradients[0], strict=True):
            torch.testing.assert_close(x, y, **EQUAL)


@pytest.mark.parametrize("form", [paper.recurrent, paper.chunked])
def test_a_sequence_in_two_parts_is_the_whole(form):
    (*tensors, state), _ = given()
    whole, last = form(*tensors, state)
    first, between = form(*(x[:, :, :13] for x in tensors), state)
    second, end = form(*(x[:, :, 13:] for x in tensors), between)
    torch.testing.assert_close(torch.cat([first, second], 2), whole, **EQUAL)
    torch.testing.assert_close(end, last, **EQUAL)


@pytest.mark.parametrize("delta", [True, False])
def test_it_is_the_hardened_version(delta):
    (q, *tensors, state), upstream = given()
    found = paper.chunked(q / math.sqrt(8), *tensors, state, C=16, delta=delta)
    wanted = gated_delta_rule(q, *tensors, state_BHDV=state, return_state=True, delta=delta, kernel="tiled")
    leaves = (q, *tensors, state)
    for x, y in zip((*found, *torch.autograd.grad(found, leaves, upstream)),
                    (*wanted, *torch.autograd.grad(wanted, leaves, upstream)), strict=True):
        torch.testing.assert_close(x, y, **EQUAL)


def test_a_form_that_drops_the_decay_is_another_one():
    (*tensors, _), _ = given()
    forgetful = tensors[:3] + [torch.zeros_like(tensors[3]), tensors[4]]
    apart = (paper.recurrent(*forgetful)[0] - paper.chunked(*tensors)[0]).abs().amax((0, 1, 3))
    assert apart[0] < 1e-12 and apart[-1] > 0.1  # nothing has faded before the first token, and much before the last


def test_the_chunked_form_is_linear_in_bytes_and_the_parallel_one_is_not():
    def read(T, form):
        tensors, _ = given(T=T, dtype=torch.float32, D=16, V=16, state=False)
        with memory.track(*tensors[:5]) as tracked:
            out = form(*tensors[:5])
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        return tracked.peak.total

    assert read(1024, paper.chunked) < 2.1 * read(512, paper.chunked)
    assert read(1024, paper.parallel) > 3.5 * read(512, paper.parallel)


def test_one_screen():
    check_paper("attention", "linear_attention")
