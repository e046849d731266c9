"""Operations that write where they are told: the same bits as always, and nothing allocated besides."""

import pytest
import torch

from refimpl import memory
from refimpl.allocator.static import out_variants as writing

aten = torch.ops.aten
X, MASK = torch.arange(24.0).view(4, 6) / 7, torch.arange(24).view(4, 6) % 3 == 0
CALLS = {
    aten.clone.default: (X.t(),), aten._to_copy.default: (X,), aten.masked_fill.Scalar: (X, MASK, -1.5),
    aten.masked_fill.Tensor: (X, MASK, torch.tensor(2.5)), aten.zeros_like.default: (X,), aten.zeros.default: ([4, 6],),
    aten.new_zeros.default: (X, [4, 6]), aten.ones_like.default: (X,), aten.ones.default: ([4, 6],),
    aten.new_ones.default: (X, [4, 6]), aten.full.default: ([4, 6], 0.1), aten.full_like.default: (X, 0.1),
    aten.embedding.default: (torch.randn(50, 6), torch.tensor([[3, 49], [0, 3]])),
    aten.add.Tensor: (X, X, ), aten.mm.default: (X, X.t().contiguous()), aten.gelu.default: (X,),
    aten._softmax.default: (X, -1, False), aten.native_layer_norm.default: (X, [6], None, None, 1e-5),
    aten.bitwise_not.default: (MASK,)}


@pytest.mark.parametrize("func", CALLS, ids=lambda func: func.name())
def test_what_is_written_is_what_is_returned(func):
    kwargs = {"dtype": torch.bfloat16} if func is aten._to_copy.default else {}
    expected = func(*CALLS[func], **kwargs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    outs = [torch.full_like(each, 3) for each in expected]
    nbytes = writing.write(func, CALLS[func], kwargs, outs)
    assert all(map(torch.equal, outs, expected)) and (nbytes == 0) == writing.writes_directly(func, "cpu")


def test_every_replacement_is_held_here():
    empty = {aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default,
             aten.new_empty_strided.default}
    assert set(writing._IN_PLACE) - empty <= set(CALLS)


def test_an_out_that_computes_elsewhere_and_copies_is_none_of_its_own():
    for name, direct in (("mm", True), ("native_layer_norm", False), ("repeat", False), ("sum.dim_IntList", True)):
        base, _, overload = name.partition(".")
        assert (writing.out_variant(getattr(getattr(aten, base), overload or "default"), "cpu") is not None) == direct


@pytest.mark.parametrize("func", [aten.mm.default, aten.add.Tensor, aten._softmax.default])
def test_nothing_is_allocated_besides(func):
    x, out = torch.randn(200, 200), torch.empty(200, 200)
    args = (x, -1, False) if func is aten._softmax.default else (x, x)
    writing.write(func, args, {}, [out])
    with memory.measure() as m:
        writing.write(func, args, {}, [out])
    assert m.peak < 4096


def test_an_index_outside_of_the_table_is_refused():
    with pytest.raises(IndexError):
        writing.write(aten.embedding.default, (torch.randn(5, 6), torch.tensor([7])), {}, [torch.empty(1, 6)])
