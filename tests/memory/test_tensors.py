import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from refimpl import memory
from refimpl.memory.tensors import dense_parts, tensors_in


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
    (torch.sparse_coo, [(2, 2)]), (torch.sparse_csr, [(4,), (2,)]), (torch.sparse_csc, [(4,), (2,)]),
])
def test_sparse_tensors_are_their_indices_and_values(layout, index_shapes):
    dense = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    parts = dense_parts(dense.to_sparse(layout=layout))
    assert [tuple(part.shape) for part in parts] == [*index_shapes, (2,)]


def test_wrapper_tensors_are_what_they_wrap():
    with memory.track() as t:
        both = TwoTensor(torch.zeros(10), torch.zeros(10)) + 1
    assert t.now.total == sum(part.nbytes for part in dense_parts(both)) == 80
