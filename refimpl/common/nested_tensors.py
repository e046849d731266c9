"""Finds the tensors in nested lists, tuples and dicts, and the tensors that own a tensor's storages."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(tree):
    """Yield every tensor in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_SPARSE = {  # layout -> the methods that give the dense tensors it is made of
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor):
    """Return the tensors that own the storages of `tensor`: itself, or the parts of a sparse or wrapper tensor."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:  # nearly always; on every operation's way
        return (tensor,)
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in parts if isinstance(part, torch.Tensor)]  # a DTensor's mesh is among them
    elif tensor.layout in _SPARSE:
        if isinstance(tensor, FakeTensor):
            raise ValueError(f"a fake {tensor.layout} tensor of shape {tuple(tensor.shape)}: its bytes depend on its "
                             "values, and it has none: make it dense, or track a real run")
        parts = [getattr(tensor, name)() for name in _SPARSE[tensor.layout]]
    else:
        return (tensor,) if tensor.layout is torch.strided else ()
    return tuple(dense for part in parts for dense in dense_parts(part))


def is_dry(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is a fake one of a dry run. (The compiler has others, through which it reads a program.)"""
    return isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "is_dry_run", False)
