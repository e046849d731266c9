import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from refimpl import memory
from refimpl.common.nested_tensors import dense_parts, is_dry, tensors_in


def test_tensors_are_found_in_nested_containers():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(tensors_in({"a": a, "rest": [b, (None, 3, "x", {"c": c})]})) == [a, b, c]


def test_a_dense_tensor_is_its_own_part():
    x = torch.zeros(4)
    assert dense_parts(x) == (x,)
    with FakeTensorMode():
        y = torch.zeros(4)
        assert dense_parts(y) == (y,)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize(("layout", "index_shapes"), [
    (torch.sparse_coo, [(2, 2)]), (torch.sparse_csr, [(4,), (2,)]), (torch.sparse_csc, [(4,), (2,)])])
def test_sparse_tensors_are_their_indices_and_values(layout, index_shapes):
    dense = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    assert [tuple(part.shape) for part in dense_parts(dense.to_sparse(layout=layout))] == [*index_shapes, (2,)]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("layout", "pointers"), [(torch.sparse_bsr, 3), (torch.sparse_bsc, 4)])
def test_sparse_blocks_are_their_indices_and_values(layout, pointers):
    dense = torch.zeros(4, 3)
    dense[0, 1] = 1
    parts = dense_parts(dense.to_sparse(layout=layout, blocksize=(2, 1)))
    assert [tuple(part.shape) for part in parts] == [(pointers,), (1,), (1, 2, 1)]


def test_a_fake_sparse_tensor_is_refused_because_its_bytes_depend_on_values():
    sparse = FakeTensorMode().from_tensor(torch.eye(5).to_sparse())
    with pytest.raises(ValueError, match=r"torch.sparse_coo tensor of shape \(5, 5\).*make it dense"):
        dense_parts(sparse)


def test_wrapper_tensors_are_what_they_wrap():
    with memory.track() as t:
        both = TwoTensor(torch.zeros(10), torch.zeros(10)) + 1
    assert t.now.total == sum(part.nbytes for part in dense_parts(both)) == 80


def test_a_fake_tensor_of_a_dry_run_alone_is_dry():
    assert memory.dry_run(lambda: is_dry(torch.zeros(2))).result
    with FakeTensorMode():
        assert not is_dry(torch.zeros(2))
    assert not is_dry(torch.zeros(2))
