"""What the tests leave out of Triton's interpreter changes nothing that a kernel computes."""

import dataclasses

import attention_kit as kit
import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from refimpl.attention import flash_attention

pytestmark = kit.in_the_interpreter()


@pytest.fixture
def as_triton_has_it(monkeypatch):
    """A function: from its call on, the interpreter does all that it does."""
    def undo():
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=True)
        monkeypatch.setattr(interpreter, "_patch_lang", quick_interpreter.walk)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    return undo


@pytest.fixture
def walks(monkeypatch):
    """The functions for which triton.language is walked through."""
    found, walk = [], quick_interpreter.walk
    monkeypatch.setattr(quick_interpreter, "walk", lambda function: [walk(function), found.append(function)][0])
    return found


def test_the_same_bits(as_triton_has_it):
    options = {"causal": True, "window": 20, "dropout_p": 0.3, "seed": 5, "cu_seqlens": [0, 9, 33]}
    given = kit.inputs(1, 2, 1, 33, 33, 16)
    quick = kit.gradients(flash_attention, *given, **options)
    as_triton_has_it()
    torch.testing.assert_close(quick, kit.gradients(flash_attention, *given, **options), rtol=0, atol=0)


def test_a_launch_walks_once_and_leaves_triton_as_it_was(walks):
    flash_attention(*kit.inputs()[:3])
    assert len(walks) == 1 and tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.to)


@triton.jit
def add_one(x, out):
    tl.store(out, tl.load(x) + 1)


def test_sums_that_overflow_wrap_around_as_before(as_triton_has_it):
    """No overflow is seen by Triton's own options either: `debug` is off."""
    assert not interpreter.interpreter_builder.options.debug
    x, found = torch.tensor([2**31 - 1], dtype=torch.int32), []
    for _ in range(2):
        found.append(torch.empty_like(x))
        add_one[(1,)](x, found[-1])
        as_triton_has_it()
    assert found[0].item() == found[1].item() == -(2**31)
