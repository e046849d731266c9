"""Which keys a query sees: the band against its definition, pair by pair. And packed sequences that the device alone
knows: nothing is read back, and what can be checked is checked."""

import functools

import attention_kit as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from refimpl.attention import flash, flash_attention
from refimpl.attention.call import arguments, sequences
from refimpl.attention.call.sequences import Band, tiles

BOUND = st.none() | st.integers(0, 9)
ENDS = torch.tensor([0, 9, 9, 23], dtype=torch.int32)
interpreted, divides = kit.in_the_interpreter()


def sees(band, i, j):
    position = i + band.S - band.T
    left = band.left is None or position - j <= band.left
    return left and (band.right is None or j - position <= band.right)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 9), BOUND, BOUND, st.data())
def test_every_question_agrees_with_the_definition(T, S, left, right, data):
    band = Band(T, S, left, right)
    seen = [[j for j in range(S) if sees(band, i, j)] for i in range(T)]
    assert band.pairs() == sum(map(len, seen))
    assert [not row for row in seen] == [i < band.fully_masked for i in range(T)]
    if not T or not S:
        return
    first, last = sorted((data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, T - 1))))
    rows = (first, last + 1)
    anyone = sorted({j for i in range(*rows) for j in seen[i]})
    assert list(range(*band.keys_seen(rows))) == anyone
    first, last = sorted((data.draw(st.integers(0, S - 1)), data.draw(st.integers(0, S - 1))))
    keys = (first, last + 1)
    expected = torch.tensor([[j not in seen[i] for j in range(*keys)] for i in range(*rows)])
    mask = band.mask(rows, keys, "cpu")
    assert torch.equal(expected, torch.zeros_like(expected) if mask is None else mask)
    assert (mask is None) == (not expected.any())


def test_causal_and_window_as_flash_attention_has_them():
    assert Band.of(4, 6, True, None) == (4, 6, None, 0) and Band.of(4, 6, False, None) == (4, 6, None, None)
    assert Band.of(4, 6, True, 2) == (4, 6, 2, 0) and Band.of(4, 6, False, 2) == (4, 6, 2, 2)
    assert Band.of(1, 6, True, None).keys_seen((0, 1)) == (0, 6)  # one new query beside the last of six keys


def test_tiles_cover_a_span():
    assert tiles((3, 10), 4) == [(3, 7), (7, 10)] and tiles((5, 5), 4) == []


@interpreted
@divides
@pytest.mark.parametrize("most", [14, 100])
def test_the_kernels_read_the_tensor_that_they_are_given(most, monkeypatch):
    """max_seqlen may be more than the longest; the operator gets the very tensors, and no others are made."""
    seen, operator = [], flash.attention_forward
    monkeypatch.setattr(flash, "attention_forward", lambda *given: seen.append(given[8:12]) or operator(*given))
    given, near = kit.inputs(1, 2, 1, 23, 23, 16), functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    kit.assert_as_reference(flash_attention, near, given, cu_seqlens=ENDS, max_seqlen=most, causal=True)
    assert seen[0][0] is seen[0][1] is ENDS and seen[0][2:] == (most, most)


@interpreted
@divides
def test_nothing_is_read_back():
    """A fake tensor has no values: whoever asks for one fails. Without max_seqlen somebody does (the mutant)."""
    with FakeTensorMode():
        q, k, v, gradient = kit.inputs(1, 2, 1, 23, 25, 16)
        ends = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
        options = {"cu_seqlens": ends[0], "cu_seqlens_k": ends[1], "sinks": torch.zeros(2, requires_grad=True)}
        found = kit.gradients(flash_attention, q, k, v, gradient, max_seqlen=14, max_seqlen_k=20, **options)
        assert [x.shape for x in found] == [q.shape, q.shape, k.shape, v.shape, (2,)]
        with pytest.raises(DataDependentOutputException):
            flash_attention(q, k, v, **options)


@interpreted
@divides
def test_compiled_in_one_graph():
    def call(q, k, v, ends):
        return flash_attention(q, k, v, cu_seqlens=ends, max_seqlen=14, causal=True)

    given = *kit.inputs(1, 2, 1, 23, 23, 16)[:3], ENDS
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


@interpreted
@divides
@pytest.mark.parametrize(("ends", "words"), [
    (torch.tensor([0, 23]), "int64: expected one dimension, int32"),
    (torch.tensor([0], dtype=torch.int32), r"cu_seqlens of shape \(1,\) on cpu: expected 0 and the end of each"),
    (torch.zeros(3, dtype=torch.int32, device="meta"), r"shape \(3,\) on meta: expected .* on cpu")], ids=str)
def test_what_can_be_seen_without_values_is_checked(ends, words, monkeypatch):
    monkeypatch.setattr(arguments, "is_known", lambda ends: False)
    for batch, options, message in ((1, {"cu_seqlens": ends}, words), (2, {"cu_seqlens": ENDS}, "with a batch of 2"), (
            1, {"cu_seqlens": ENDS, "cu_seqlens_k": ENDS[::3]}, "queries in 3 sequences and keys in 1")):
        with pytest.raises(ValueError, match=message):
            flash_attention(*kit.inputs(batch, 2, 1, 23, 23, 16)[:3], **options, max_seqlen=23)


@interpreted
@divides
@pytest.mark.parametrize("ends", [[1, 23], [0, 5, 4, 23], [0, 22], [0, 1, 23]])
def test_the_device_checks_the_values(ends, monkeypatch):
    """The assertion that a GPU makes, here made at once."""
    monkeypatch.setattr(sequences, "_on_cuda", lambda ends: True)
    sequences.check_on_device("cu_seqlens", ENDS, 23, 14)
    with pytest.raises(RuntimeError, match="cu_seqlens: expected to begin with 0, not to decrease, to end with 23"):
        sequences.check_on_device("cu_seqlens", torch.tensor(ends, dtype=torch.int32), 23, 14)
