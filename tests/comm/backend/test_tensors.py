"""Which tensors the backends can reduce and move, and when `out` may be what a collective reads."""

import pytest
import torch

from refimpl import memory
from refimpl.comm.backend.tensors import as_bytes, check_out, reduction, resolved, same_memory


@pytest.mark.parametrize("x", [
    torch.tensor([1 + 2j, 3]), torch.tensor([True, False]), torch.empty(0, dtype=torch.complex64),
    torch.empty(0, dtype=torch.bool).as_strided((0,), (2,)),
    torch.ones(8, dtype=torch.complex64).as_strided((1,), (2,)), torch.ones(2, 3, dtype=torch.int16),
    torch.tensor(True)], ids=str)
def test_bytes_of_what_has_no_name_share_its_memory(x):
    raw = as_bytes(x)
    assert raw.dtype is torch.uint8 and raw.numel() == x.nbytes and raw.data_ptr() == x.data_ptr()


def test_what_has_a_name_goes_as_it_is():
    x = torch.ones(3, dtype=torch.bfloat16)
    assert as_bytes(x) is x


def test_a_conjugate_is_resolved_into_memory_that_counts():
    z = torch.tensor([1 + 2j, 3 + 4j])
    assert resolved(z) is z
    with memory.track(z) as t:
        conjugate, negative = resolved(z.conj()), resolved(z.conj().imag)
    assert not conjugate.is_conj() and not negative.is_neg() and negative.tolist() == [-2, -4]
    assert t.now["communication"] == conjugate.nbytes + negative.nbytes


def test_reductions_that_are_refused():
    assert reduction("max", torch.ones(1, dtype=torch.bool)) is reduction("sum", torch.ones(1, dtype=torch.bool))
    for op, dtype, words in [("mean", torch.float32, "op='mean'"), (None, torch.float32, "op=None"),
                             ([], torch.float32, r"op=\[\]"), ("avg", torch.int64, "only float32"),
                             ("avg", torch.bool, "only float32"), ("sum", torch.complex64, "complex64 cannot")]:
        with pytest.raises(ValueError, match=words):
            reduction(op, torch.ones(1, dtype=dtype))


def test_the_same_memory():
    x = torch.zeros(4, 4)
    assert same_memory(x, x) and same_memory(x, x.detach()) and same_memory(x[1], x[1])
    assert not same_memory(x, x.t()) and not same_memory(x[0], x[1]) and not same_memory(x, x.clone())


X = torch.zeros(8)
ALLOWED = [("all_reduce", X, X), ("broadcast", X[2:], X[2:]), ("all_gather", X[4:], X), ("reduce_scatter", X, X[4:]),
           ("recv", X, X), ("all_to_all", X[:4], X[4:]), ("all_reduce", X[:2], X[2:4]), ("send_recv", X, X.clone()),
           ("all_reduce", X[::2], X[1::2]), ("all_to_all", X[:0], X[:0])]
REFUSED = [("all_reduce", X[1:3], X[:2]), ("broadcast", X[:2], X[1:3]), ("all_gather", X[:4], X),
           ("all_gather", X[3:7], X), ("reduce_scatter", X, X[:4]), ("all_to_all", X, X), ("send_recv", X, X),
           ("send_recv", X[:5], X[4:])]


@pytest.mark.parametrize("collective, x, out", ALLOWED)
def test_rank_1_of_2_may_write_here(collective, x, out):
    before = out.clone()
    check_out(collective, x, out, 1)
    assert torch.equal(out, before)


@pytest.mark.parametrize("collective, x, out", REFUSED)
def test_rank_1_of_2_must_not_write_where_it_reads(collective, x, out):
    with pytest.raises(ValueError, match=f"{collective} cannot write to the memory that it reads"):
        check_out(collective, x, out, 1)


def test_elements_that_share_memory_cannot_be_written_to():
    with pytest.raises(ValueError, match=r"strides \(0,\): its elements share memory"):
        check_out("all_reduce", X, torch.zeros(1).expand(8), 0)
