"""Who holds a tensor, in the script's own names: `Agent.memory`, `.grad` of `photos[…]`, `x` in the closure of `hook`.

Python's collector tells who refers to an object (`names`). What C++ holds has no referrer: gradients are looked for in
every tensor that wants one, and what was saved for backward in the graph of every tensor that has one.
"""

import gc
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ...common.nested_tensors import dense_parts, tensors_in
from .names import CYCLE, UNSEEN, Names

CURES = {"the graph": "keep its `.detach()`, or its `.item()`: a tensor with a graph keeps what the graph saved",
         "`.grad`": "compute with `x.detach().requires_grad_()` in place of `x`, whose `.grad` stays with it",
         CYCLE: "copy a state_dict() in place of the object, or call gc.collect()"}


class Holder(NamedTuple):
    """Who holds a storage, in `words`. `cure`: what would let it go, "" if that is not known. `is_full`: whether it is
    held by a deque or cache that drops one for each new one."""

    words: str
    cure: str = ""
    is_full: bool = False


class Holders:
    """Says who holds storages: `Holders(keys)[key]`, a Holder. A key is the `_cdata` of a storage.

    All tensors of the process are looked through, once.
    """

    def __init__(self, keys):
        self._tensors = {key: [] for key in keys}  # those on a storage that Python sees
        self._beside = {}  # key -> (what, tensor): a tensor holds the storage as its `what`
        self._search()
        self._names = Names(ignored=[self._tensors, *self._tensors.values(), *self._beside.values()])

    def _search(self):
        for tensor, what, beside in tensors_there():
            for key in _keys(tensor):
                if key in self._tensors:
                    self._tensors[key].append(tensor)
            self._note(beside, what, tensor)

    def _note(self, tensors, what, holder):
        for tensor in tensors:
            for key in _keys(tensor):
                if key in self._tensors:
                    self._beside.setdefault(key, (what, holder))

    def __getitem__(self, key):
        what, tensor = self._beside.get(key, (None, None))
        if tensor is not None:
            return Holder(f"{what} of {self._names.of(tensor)}", CURES[what], self._names.is_full(tensor))
        words, is_full = UNSEEN, False
        for tensor in self._tensors[key]:  # each asks the whole process, so the first that the script names will do
            name = self._names.of(tensor)
            if words == UNSEEN or "`" in name:
                words, is_full = name, self._names.is_full(tensor)
            if "`" in name:
                break
        return Holder(words.replace("[…]`", "`"), CURES.get(words, ""), is_full)


def tensors_there():
    """Yield of each tensor that Python knows (it, what else it keeps, those tensors): its `.grad`, or what the graph
    behind it has saved. Those come first behind whose graph no other begins: what the program holds is among them."""
    seen = set()
    tensors = [thing for thing in gc.get_objects()
               if issubclass(type(thing), torch.Tensor) and not is_functorch_wrapped_tensor(thing)]
    inside = _inside(tensors)
    for thing in sorted(tensors, key=lambda tensor: tensor.grad_fn in inside):
        if thing.grad_fn is not None:
            yield thing, "the graph", saved_by(thing.grad_fn, seen)
        else:
            yield thing, "`.grad`", [thing.grad] if thing.requires_grad and thing.grad is not None else []


def _inside(tensors):
    """Return the nodes of graphs that another node leads to."""
    todo, seen, found = [tensor.grad_fn for tensor in tensors], set(), set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            following = [after for after, _ in node.next_functions if after is not None]
            found.update(following)
            todo += following
    return found


def _keys(tensor):
    """List the keys of a tensor's storages."""
    try:
        return [part.untyped_storage()._cdata for part in dense_parts(tensor)]
    except (RuntimeError, NotImplementedError, ValueError):  # meta, or a layout without a storage
        return []


def saved_by(node, seen):
    """Yield the tensors that the graph from an autograd node on keeps for backward. `seen`: nodes met, and now these.

    They are taken as a pack hook left them: to unpack them would run the program's code.
    """
    todo = [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [after for after, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                yield from _kept(node, name)


def _kept(node, name):
    try:
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            yield from tensors_in(each.data)
    except RuntimeError:  # its backward has freed it
        return
