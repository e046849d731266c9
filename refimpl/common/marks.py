"""Marks: a technique says what a tensor is for, and every meter knows it by that.

A meter puts itself into `meters` while it counts, and `tell` calls those of its methods that are named as the event.
Without a meter a mark costs a weak reference.
"""

import weakref
from typing import TYPE_CHECKING

from torch.compiler import is_compiling

from .ledger import category_name
from .nested_tensors import dense_parts

if TYPE_CHECKING:
    import torch

meters = []  # those that count now, outermost first
_marks = {}  # storage key -> (weak reference, category); outlives any meter


def mark(tensor: "torch.Tensor", category: str) -> "torch.Tensor":
    """Give the storage of `tensor` a category, e.g. `"communication"`, in every tracker now and later. Returns
    `tensor`.

    Views share the mark. It ends with the storage.
    """
    for dense in dense_parts(tensor):
        storage = dense.untyped_storage()
        key = storage._cdata
        # an address is used again: the mark goes with its storage
        _marks[key] = weakref.ref(storage, lambda _, key=key: _marks.pop(key, None)), category_name(category)
        tell("marked", dense)
    return tensor


def mark_of(storage):
    """Return the category that `storage` was marked with, or None."""
    return _marks.get(storage._cdata, (None, None))[1]


def tell(event, *args):
    """Call the method `event` of every meter that has it. Not in code that is being compiled: that runs as one
    piece."""
    if is_compiling():
        return
    for meter in meters:
        if hear := getattr(meter, event, None):
            hear(*args)
