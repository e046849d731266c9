"""Bytes that move between memory and the chip: what the kernels ask for, in closed form, and counted as they run.

Peak bytes say what must be in memory at one time, traffic says what must move. An operator of PyTorch reads its inputs
and writes its outputs, each at least once (`moved`). A kernel that holds a tile of queries on the chip reads the keys
once for each such tile (`counted`), so its traffic falls as the tile grows, and no tensor's size shows it. That is what
programs ask for. A GPU's cache serves some of it, all but the first read if a head's keys fit; so what crosses the
memory bus is between the two.
"""

import collections
import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .call.sequences import tiles
from .kernels.configs import DELTA, INTERPRETED, KERNELS
from .reference import resolve_shapes


class KernelTraffic(NamedTuple):
    """Bytes that programs load and store."""

    loaded: int
    stored: int


def flash_attention_traffic(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
                            causal: bool = False, window: int | None = None,
                            configs: Any = None) -> dict[str, KernelTraffic]:
    """Predict the {kernel: KernelTraffic} of `flash_attention`'s kernels for shapes (B, H, T, D) and (B, G, S, D),
    exact. With Q = BHTD and K = BGSD elements of e bytes, N keys that a tile of block_m queries visits, M queries that
    a tile of block_n keys visits:

        forward    loads e·Q + 2e·D·ΣN                     stores e·Q + 4·BHT
        delta      loads 2e·Q                              stores 4·BHT
        dkdv       loads 2e·K + (2e·D + 8)·ΣM              stores 2e·K
        dq         loads 2e·Q + 8·BHT + 2e·D·ΣN            stores e·Q

    Sums over the tiles of all query heads: for each head ΣN is T/block_m · S and ΣM is S/block_n · T, if no tile is
    skipped. Each head of a group reads its keys itself. Without dropout, not packed. `configs`: {kernel: Config} of
    the tiles, by default those of the interpreter. Raises as `flash_attention` does, and ValueError for a kernel in
    `configs` that is not in this table.
    """
    size = dict.fromkeys(KERNELS, INTERPRETED) | {"delta": DELTA}
    if unknown := set(configs or ()) - set(size):
        raise ValueError(f"configs of {sorted(unknown)}: expected some of {sorted(size)}")
    size |= configs or {}
    call, (e, _) = resolve_shapes(q_shape, k_shape, dtype, causal=causal, window=window)
    (B, H, T, D), (G, S), band = q_shape, k_shape[1:3], call.sequences[0].band
    Q, K, rows = e * B * H * T * D, e * B * G * S * D, 4 * B * H * T
    forward, dq = (2 * e * D * B * H * sum(_keys(band, tile, size[name].block_n)
                                           for tile in tiles((0, T), size[name].block_m)) for name in ("forward", "dq"))
    dkdv = (2 * e * D + 8) * B * H * sum(_queries(band, tile, size["dkdv"].block_m)
                                         for tile in tiles((0, S), size["dkdv"].block_n))
    return {"forward": KernelTraffic(Q + forward, Q + rows), "delta": KernelTraffic(2 * Q, rows),
            "dkdv": KernelTraffic(2 * K + dkdv, 2 * K), "dq": KernelTraffic(2 * Q + 2 * rows + dq, Q)}


def _keys(band, queries, size):
    """Count the keys that are loaded for a tile of queries: whole tiles of `size`, cut off at S only."""
    first, end = band.keys_seen(queries)
    first = first // size * size  # key_range begins at a multiple of the tile
    return min(band.S, first + -(-(end - first) // size) * size) - first


def _queries(band, keys, size):
    """Count the queries that are loaded for a tile of keys, likewise: `row_range` of the kernels."""
    shift = band.S - band.T
    first = 0 if band.right is None else max(0, keys[0] - shift - band.right)
    end = band.T if band.left is None else min(band.T, keys[1] - shift + band.left)
    return max(0, min(band.T, first + -(-(end - first) // size) * size) - first)


class Counted(NamedTuple):
    """Bytes by tensor, "other" for all that were not named; `largest`: the most elements of a tensor that one `tl.load`
    fetched."""

    loaded: collections.Counter
    stored: collections.Counter
    largest: collections.Counter


@contextlib.contextmanager
def counted(**tensors):
    """Count, while kernels run in Triton's interpreter, every element that a program's `tl.load` and `tl.store` do not
    mask out. Gives a Counted.

        with counted(q=q, k=k, v=v) as traffic:
            flash_attention(q, k, v)
        traffic.loaded["k"] / k.nbytes           # how often k was read

    The named tensors are on the CPU and share no memory. Raises RuntimeError in a process that does not interpret: a
    GPU has no such meter.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("traffic is counted in Triton's interpreter only: set TRITON_INTERPRET=1 before Triton is "
                           "imported, in a process of its own if this one is to use the GPU")
    # the interpreter's own loads: kernels stay as they are
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    found = Counted(collections.Counter(), collections.Counter(), collections.Counter())
    spans = {name: _span(x) for name, x in tensors.items()}
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def counting_load(self, ptrs, mask, *rest):
        for name, count in _add(found.loaded, spans, ptrs, mask).items():
            found.largest[name] = max(found.largest[name], count)
        return load(self, ptrs, mask, *rest)

    def counting_store(self, ptrs, value, mask, *rest):
        _add(found.stored, spans, ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    # on the class: each program that runs meanwhile counts
    Builder.create_masked_load, Builder.create_masked_store = counting_load, counting_store
    try:
        yield found
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store


def _span(x):
    """Return (first address, end) of a tensor's elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _add(counter, spans, ptrs, mask):
    """Add the bytes to the counter; returns {name: elements}."""
    at, nbytes = ptrs.data[mask.data], ptrs.get_element_ty().primitive_bitwidth // 8
    counts = {name: int(((at >= first) & (at < end)).sum()) for name, (first, end) in spans.items()}
    counts["other"] = at.size - sum(counts.values())  # so that nothing is left out of the sum
    for name, count in counts.items():
        counter[name] += count * nbytes
    return counts


class moved(TorchDispatchMode):
    """Count the bytes that PyTorch's operators must move: each reads its inputs and writes its outputs once, and keeps
    nothing on the chip for the next. Views move nothing. A custom operator counts like any other, whatever its kernels
    ask for.

        with moved() as traffic:
            reference_attention(q, k, v)
        traffic.loaded, traffic.stored           # also by operator: traffic.by_operator["aten.mul"]
    """

    def __init__(self):
        super().__init__()
        self.by_operator = collections.defaultdict(lambda: KernelTraffic(0, 0))

    @property
    def loaded(self):
        return sum(each.loaded for each in self.by_operator.values())

    @property
    def stored(self):
        return sum(each.stored for each in self.by_operator.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        old = {where for where, *_ in given}  # an output on an input's storage is a view, unless it was written
        written = {x for x in made if x[0] not in old or function._schema.is_mutable}
        if written and not function.__name__.startswith(("empty", "new_empty")):  # those are not written yet
            name = str(function.overloadpacket)
            loaded, stored = self.by_operator[name]
            self.by_operator[name] = KernelTraffic(loaded + _nbytes(given), stored + _nbytes(written))
        return result


def _tensors(tree):
    """Describe the tensors of a tree: {(storage, offset, (size, stride) of each dimension with a stride, itemsize)}."""
    return {(x.untyped_storage().data_ptr(), x.storage_offset(),
             # an expanded dimension is read once
             tuple((size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if stride),
             x.element_size()) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


def _nbytes(tensors):
    return sum(each * math.prod(size for size, _ in dimensions) for *_, dimensions, each in tensors)
