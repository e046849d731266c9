"""Packed sequences that the device alone knows: nothing is read back, and what can be checked is checked."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from refimpl.attention import flash, flash_attention, reference_attention
from refimpl.attention.call import packing
from refimpl.attention.triton_forward import forward_kernel

pytestmark = [
    pytest.mark.skipif(type(forward_kernel).__name__ != "InterpretedFunction", reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
ENDS = torch.tensor([0, 9, 9, 23], dtype=torch.int32)


@pytest.mark.parametrize("most", [14, 100])
def test_the_kernels_read_the_tensor_that_they_are_given(most, kit, monkeypatch):
    """max_seqlen may be more than the longest; the operator gets the very tensors, and no others are made."""
    seen, operator = [], flash.attention_forward
    monkeypatch.setattr(flash, "attention_forward", lambda *given: seen.append(given[8:12]) or operator(*given))
    q, k, v, gradient = kit.inputs(1, 2, 1, 23, 23, 16)
    found, expected = (kit.gradients(f, q, k, v, gradient, cu_seqlens=ENDS, max_seqlen=most, causal=True)
                       for f in (flash_attention, reference_attention))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert seen[0][0] is seen[0][1] is ENDS and seen[0][2:] == (most, most)


def test_nothing_is_read_back(kit):
    """A fake tensor has no values: whoever asks for one fails. Without max_seqlen somebody does (the mutant)."""
    with FakeTensorMode():
        q, k, v, gradient = kit.inputs(1, 2, 1, 23, 25, 16)
        ends = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
        options = {"cu_seqlens": ends[0], "cu_seqlens_k": ends[1], "sinks": torch.zeros(2, requires_grad=True)}
        found = kit.gradients(flash_attention, q, k, v, gradient, max_seqlen=14, max_seqlen_k=20, **options)
        assert [x.shape for x in found] == [q.shape, q.shape, k.shape, v.shape, (2,)]
        with pytest.raises(DataDependentOutputException):
            flash_attention(q, k, v, **options)


def test_compiled_in_one_graph(kit):
    q, k, v, gradient = kit.inputs(1, 2, 1, 23, 23, 16)

    def call(q, k, v, ends):
        return flash_attention(q, k, v, cu_seqlens=ends, max_seqlen=14, causal=True)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, ENDS)
    assert torch.equal(found, call(q, k, v, ENDS))


@pytest.mark.parametrize(("ends", "words"), [
    (torch.tensor([0, 23]), "int64: expected one dimension, int32"),
    (torch.tensor([0], dtype=torch.int32), r"cu_seqlens of shape \(1,\) on cpu: expected 0 and the end of each"),
    (torch.zeros(3, dtype=torch.int32, device="meta"), r"shape \(3,\) on meta: expected .* on cpu")], ids=str)
def test_what_can_be_seen_without_values_is_checked(ends, words, kit, monkeypatch):
    monkeypatch.setattr(packing, "_is_known", lambda ends: False)
    with pytest.raises(ValueError, match=words):
        flash_attention(*kit.inputs(1, 2, 1, 23, 23, 16)[:3], cu_seqlens=ends, max_seqlen=23)
    with pytest.raises(ValueError, match="queries in 3 sequences and keys in 1"):
        flash_attention(*kit.inputs(1, 2, 1, 23, 23, 16)[:3], cu_seqlens=ENDS, cu_seqlens_k=ENDS[::3], max_seqlen=23)
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2"):
        flash_attention(*kit.inputs(2, 2, 1, 23, 23, 16)[:3], cu_seqlens=ENDS, max_seqlen=23)


@pytest.mark.parametrize("ends", [[1, 23], [0, 5, 4, 23], [0, 22], [0, 1, 23]])
def test_the_device_checks_the_values(ends, monkeypatch):
    """The assertion that a GPU makes, here made at once."""
    monkeypatch.setattr(packing, "_on_cuda", lambda ends: True)
    packing.check_on_device("cu_seqlens", ENDS, 23, 14)
    with pytest.raises(RuntimeError, match="cu_seqlens: expected to begin with 0, not to decrease, to end with 23"):
        packing.check_on_device("cu_seqlens", torch.tensor(ends, dtype=torch.int32), 23, 14)
