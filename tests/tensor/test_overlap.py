"""What the wire takes beside computation in the backward of a layer by columns: arithmetic, over a link.

Matrices take time by their size, as on a GPU of 1 GFLOP/s, and no core.
"""

import pytest
import torch
from patience import about, against_the_clock
from rank_pool import at_once, pooled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.comm import Link, compute
from refimpl.comm.rank_timeline import timeline
from refimpl.tensor import ColumnParallelLinear, closed_forms
from refimpl.tensor.conjugate import own_rows, whole_sequence

RATE = 1e9  # floating-point operations in a second
TOKENS, C, F = 256, 256, 2048  # of which a rank of two has 1,024 features: 0.134 s for dx, and for dA
X = TOKENS * C * 4  # bytes, half of which a rank sends in an all_gather
PRODUCT = 2 * TOKENS * C * F / 2 / RATE


class Timed(TorchDispatchMode):
    """Takes the time of a matrix product, and computes it, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            a, b = args[:2]
            compute(2 * a.shape[0] * a.shape[1] * b.shape[1] / RATE, "product")
        return func(*args, **kwargs or {})


def backward(comm, rate, by_tokens, mutant=False):
    """The timeline of a layer's backward."""
    torch.manual_seed(0)
    if mutant:
        comm.all_reduce = at_once(comm.all_reduce)
    layer = ColumnParallelLinear(nn.Linear(C, F), comm)
    x = torch.randn(1, TOKENS, C)
    if by_tokens:
        rows = own_rows(x, comm).requires_grad_()
        x = whole_sequence(rows.detach(), comm, x.shape[:-1])
        x.sequence_rows = rows, x.shape[:-1]
    y = layer(x.requires_grad_())
    comm.link = Link(rate)
    comm.barrier()
    with timeline() as line, Timed():
        y.backward(torch.ones_like(y))
    comm.link = None
    return line


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.5])  # of the link's time for one all_gather of x, in that of a product
@against_the_clock
def test_what_backward_waits_for_is_arithmetic(share, by_tokens):
    gather = share * PRODUCT
    reduce = gather if by_tokens else 2 * gather  # an all_reduce sends twice as much
    seconds, waited = closed_forms.column_backward_seconds(PRODUCT, PRODUCT, reduce, gather if by_tokens else 0.0)
    for line in pooled(backward, 2, X / 2 / gather, by_tokens):
        kinds = ("all_gather", "reduce_scatter") if by_tokens else ("all_reduce",)
        taken = max(span.end for span in line.spans) - min(span.begin for span in line.spans)
        about([taken / 1e9], seconds, 0.05 * seconds)
        about([sum(line.waited(kind) for kind in kinds)], waited, 0.05 * seconds)


@against_the_clock
def test_a_version_that_waits_before_the_weights_fails():
    for line in pooled(backward, 2, X / PRODUCT, False, True):
        about([line.hidden("all_reduce")], 0.0, 0.05 * PRODUCT)


def test_the_arithmetic():
    assert closed_forms.column_backward_seconds(2, 3, 2) == (5, 0)
    assert closed_forms.column_backward_seconds(0.5, 3, 2) == (3.5, 0)
    assert closed_forms.column_backward_seconds(2, 3, 4) == (6, 1)
    assert closed_forms.column_backward_seconds(2, 3, 4, 5) == (9, 4)
