"""Says which part of which tensor a rank holds, and which ranks hold the same: one description of every way to cut.

    the whole, (4, 6)      a block of it             a flat part of the block
    · · · · · ·            · · · # # #               · · · · · ·      tensor parallelism cuts a tensor into blocks; ZeRO
    · · · · · ·            · · · # # #               · · · · # #      cuts a block, its elements in row-major order, at
    · · · · · ·            · · · # # #               · · · # # #      any element: here elements 4 … 9 of the 12
    · · · · · ·            · · · # # #               · · · # · ·

A flat part of a block with d dimensions is at most 2d − 1 boxes: the rest of a row, of a matrix, …, whole ones, and the
beginnings of the next. Two boxes have a box in common. So elements move between any two cuts of a tensor, box by box.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .comm.texts import gather_results

if TYPE_CHECKING:
    from .comm.communicator import Communicator


@dataclass(frozen=True)
class ShardSpec:
    """Describes the part of a tensor that a rank holds. ValueError if the tensor has no such part.

    - `name`, `shape`: of the whole tensor, as in the model that nobody has cut.
    - `offsets`, `lengths`: where this rank's block begins in it, and the block's shape. By default it is the whole.
    - `first`, `end`: elements first … end − 1 of the block are here, in row-major order; by default all of them.
    - `fused`: (dim, n) if that dim of the whole is n equal parts side by side, as gate and up in one weight, and the
      block is the same range of each: its offset counts from where a part begins, its length is of all n together.
    - `order`: the dims from the outermost to the innermost, if elements are in another order: (0, 2, 3, 1) of a part of
      a weight in torch.channels_last.
    - `replicas`: all ranks that hold these elements, this one included, as numbers in the communicator of all ranks
      that hold a part of the model; () if this rank alone does.
    """

    name: str
    shape: tuple
    offsets: tuple = None
    lengths: tuple = None
    first: int = 0
    end: int = None
    replicas: tuple = ()
    order: tuple = ()
    fused: tuple = ()

    def __post_init__(self):
        shape = tuple(self.shape)
        offsets = (0,) * len(shape) if self.offsets is None else tuple(self.offsets)
        lengths = shape if self.lengths is None else tuple(self.lengths)
        block = math.prod(lengths)
        filled = {"shape": shape, "offsets": offsets, "lengths": lengths, "replicas": tuple(self.replicas),
                  "order": tuple(self.order), "fused": tuple(self.fused),
                  "end": block if self.end is None else self.end}
        for key, value in filled.items():
            object.__setattr__(self, key, value)  # the dataclass is frozen, so that specs are keys
        if self.fused:
            dim, n = self.fused
            if self.order or lengths[dim] % n or shape[dim] % n:
                raise ValueError(f"{self.name}: {n} parts side by side in dim {dim} of {shape}, of which {lengths} are "
                                 "here: expected equal parts in row-major order")
            self.apart(*self.fused)  # which checks the sizes
        elif not len(shape) == len(offsets) == len(lengths) or any(
                begin < 0 or length < 0 or begin + length > size
                for begin, length, size in zip(offsets, lengths, shape, strict=True)):
            raise ValueError(f"{self.name}: a block of {lengths} at {offsets}: expected a part of {shape}")
        if not 0 <= self.first <= self.end <= block:
            raise ValueError(f"{self.name}: elements [{self.first}, {self.end}]: expected a part of {block} elements")

    @property
    def numel(self) -> int:
        """Return how many elements are here."""
        return self.end - self.first

    def cut(self, first: int, end: int) -> "ShardSpec":
        """Return the spec of elements first … end − 1 of the block. ValueError if they are not all here."""
        if not self.first <= first <= end <= self.end:
            raise ValueError(f"{self.name}: cut to elements [{first}, {end}]: expected a part of [{self.first}, "
                             f"{self.end}], which is here")
        return replace(self, first=first, end=end)

    def apart(self, dim: int, n: int) -> "ShardSpec":
        """Return the same elements of a whole whose dim is two: which of n equal parts, and where in it. ValueError for
        a block that is in several parts and has not all of them whole."""
        def two(sizes, both):
            return (*sizes[:dim], *both, *sizes[dim + 1:])

        size, begin, length = self.shape[dim] // n, self.offsets[dim], self.lengths[dim]
        if self.order:
            raise ValueError(f"{self.name}: order {self.order} of a whole with {n} parts side by side in dim {dim}")
        if self.fused or length == self.shape[dim]:
            offsets, lengths = (0, begin), (n, length // n)
        else:
            offsets, lengths = (begin // size, begin % size), (1, length)
        return replace(self, shape=two(self.shape, (n, size)), offsets=two(self.offsets, offsets),
                       lengths=two(self.lengths, lengths), fused=())

    def block(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the block of a whole tensor, a view of it unless parts are fused."""
        if self.fused:
            dim, n = self.fused
            return self.apart(dim, n).block(whole.unflatten(dim, (n, -1))).flatten(dim, dim + 1)
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))]

    def boxes(self) -> list[Any]:
        """Return the elements as [(offsets in the whole, lengths, place)]: each box is contiguous in this rank's flat
        elements, and begins there at `place`."""
        if self.fused:
            dim, n = self.fused
            return [each for box in self.apart(dim, n).boxes() for each in _together(box, dim, self.shape[dim] // n)]
        dims = self.order or range(len(self.lengths))
        sizes, place_of = [self.lengths[dim] for dim in dims], [dims.index(dim) for dim in range(len(dims))]
        found, at, strides = [], self.first, _strides(sizes)
        while at < self.end:
            # The largest rows (matrices, …) that begin here and end before the end, as many as are in one of the next.
            dim = next((d for d, n in enumerate(strides) if at % n == 0 and at + n <= self.end), 0)
            step = strides[dim] if strides else 1
            index = [at // n % length for n, length in zip(strides, sizes, strict=True)]
            count = min((self.end - at) // step, sizes[dim] - index[dim]) if strides else 1
            lengths = (*(1,) * dim, count, *sizes[dim + 1:]) if strides else ()
            found.append((tuple(o + index[i] for o, i in zip(self.offsets, place_of, strict=True)),
                          tuple(lengths[i] for i in place_of), at - self.first))
            at += count * step
        return found


@dataclass(eq=False)
class Shard:
    """A part of a tensor that a rank holds, as an engine hands it to `refimpl.saving`. ValueError if its sizes differ.

    - `spec`: which elements. Its `replicas` are those that an engine does not keep alike by data parallelism over all
      of its ranks: ranks that compute with the same data, and those of the other groups in hybrid sharding.
    - `values`: those elements, flat, as they are *held*: the fp32 master of a 16-bit parameter, if there is one.
    - `kind`: "parameters" (trained), "frozen" (parameters that are not) or "buffers".
    - `dtype`: of the model's own tensor.
    - `own`: what the optimizer updates, with as many elements as `values`: its state is `optimizer.state[own]`. It may
      have the shape of a whole parameter. None for what is not trained.
    - `owned`: the part that this rank writes and counts in norms, as `spec.cut` returns it, so that each element is
      exactly one rank's; None if all of it is other ranks'.
    - `group`: consecutive shards of one group are loaded together (a ZeRO bucket).
    """

    spec: ShardSpec
    values: torch.Tensor
    kind: str
    dtype: torch.dtype
    own: torch.nn.Parameter | None = None
    owned: ShardSpec | None = None
    group: Hashable = None

    def __post_init__(self):
        for what in ("values", "own"):
            if (tensor := getattr(self, what)) is not None and tensor.numel() != self.spec.numel:
                raise ValueError(f"{self.spec.name}: {what} has {tensor.numel()} elements: expected {self.spec.numel}, "
                                 "as its spec says")
        if (self.own is None) == (self.kind == "parameters") or self.kind not in ("parameters", "frozen", "buffers"):
            raise ValueError(f"{self.spec.name}: kind is {self.kind!r} and own is {self.own}: expected 'parameters' "
                             "and what the optimizer updates, or 'frozen' or 'buffers' and None")
        if self.owned is not None and self.owned != self.spec.cut(self.owned.first, self.owned.end):
            raise ValueError(f"{self.spec.name}: owned is {self.owned}: expected a cut of {self.spec}")


def set_spec(parameter: torch.Tensor, spec: ShardSpec, names: Sequence[str] = (), room: int | None = None) -> None:
    """Say which part of the whole a parameter (or a buffer) is: for a technique that cuts a model from outside.

    - `names`: all names of the whole in the model that nobody has cut, if the cut model has others.
    - `room`: elements of the largest part of any rank, if they differ: what stands behind it in a bucket then begins at
      the same place on all ranks, so that replicas are cut alike.
    """
    if math.prod(spec.lengths) != spec.numel or spec.lengths != tuple(parameter.shape):
        raise ValueError(f"{spec.name}: the parameter has shape {tuple(parameter.shape)}, its spec {spec.numel} "
                         f"elements of a block of {spec.lengths}: expected the whole block")
    parameter.shard_spec, parameter.whole_names, parameter.room = spec, tuple(names), room


def spec_of(name: str, parameter: torch.Tensor) -> ShardSpec:
    """Return the spec that `set_spec` gave a parameter; else that of a whole tensor of this name."""
    return getattr(parameter, "shard_spec", None) or ShardSpec(name, tuple(parameter.shape))


def names_of(name: str, parameter: torch.Tensor) -> Any:
    """Return all names that the whole of a parameter of this name has in the model that nobody has cut."""
    return getattr(parameter, "whole_names", None) or (name,)


def room_of(parameter: torch.Tensor) -> int:
    """Return how many elements a bucket keeps for a parameter: those of the largest part that a rank has of it."""
    return getattr(parameter, "room", None) or parameter.numel()


def set_apart(parameter: torch.Tensor) -> None:
    """Say that nothing else is in a parameter's bucket: so it is cut alike on ranks that hold other parameters beside
    it, as a pipeline's first and last of a tied embedding."""
    parameter.is_apart = True


def is_apart(parameter: torch.Tensor) -> bool:
    """Tell whether `set_apart` was called."""
    return getattr(parameter, "is_apart", False)


# --- between two cuts ------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A box within the flat elements of a shard: from `begin`, with this size and these strides."""

    begin: int
    size: tuple
    stride: tuple

    @property
    def end(self) -> int:
        """Return the place after its last element."""
        return self.begin + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the box, as a view of a shard's flat elements."""
        return flat[self.begin : self.end].as_strided(self.size, self.stride)


def overlaps(a: ShardSpec, b: ShardSpec) -> list[tuple[View, View]]:
    """Return [(View, View)]: the elements that two specs of one tensor share, in the elements of `a` and of `b`."""
    found = []
    for mine, theirs in itertools.product(a.boxes(), b.boxes()):
        low = tuple(map(max, mine[0], theirs[0]))
        size = tuple(min(o + n, p + m) - at for at, o, n, p, m in zip(low, *mine[:2], *theirs[:2], strict=True))
        if all(n > 0 for n in size):
            found.append((_view(mine, low, size, a.order), _view(theirs, low, size, b.order)))
    return found


def copy_overlap(target: torch.Tensor, spec: ShardSpec, source: torch.Tensor, source_spec: ShardSpec) -> None:
    """Copy the elements that two specs share from the flat tensor `source` to the flat tensor `target`."""
    for mine, theirs in overlaps(spec, source_spec):
        mine.of(target).copy_(theirs.of(source))


def _together(box, dim, size):
    """Yield boxes of a whole in which a box's dims `dim` (which part) and the next (where in its `size`) are one."""
    offsets, lengths, place = box
    inner = math.prod(lengths[dim + 1:])
    for i, index in enumerate(itertools.product(*map(range, lengths[:dim + 1]))):
        *outer, part = (o + at for o, at in zip(offsets, index, strict=False))
        yield ((*outer, part * size + offsets[dim + 1], *offsets[dim + 2:]), (*(1,) * dim, *lengths[dim + 1:]),
               place + i * inner)


def _view(box, low, size, order):
    offsets, lengths, place = box
    strides = _strides(lengths, order)
    return View(place + sum((at - o) * n for at, o, n in zip(low, offsets, strides, strict=True)), size, strides)


def _strides(lengths, order=()):
    dims = list(order or range(len(lengths)))
    return tuple(math.prod(lengths[inner] for inner in dims[dims.index(dim) + 1:]) for dim in range(len(lengths)))


# --- does each element exist, and once? ------------------------------------------------------------------------------


def check_specs(specs: Any) -> None:
    """Raise ValueError, by name, unless the ranks' specs are each element of each tensor once, or on ranks that name
    each other as replicas. `specs`: [the specs of each rank], or {rank: its specs}."""
    pieces = {}
    for rank, spec in check_replicas(specs):
        pieces.setdefault(spec.name, []).append((spec, f"on rank {rank}"))
    for name, each in pieces.items():
        (first, where), *_ = each
        if other := next(((spec.shape, there) for spec, there in each if spec.shape != first.shape), None):
            raise ValueError(f"{name} has shape {first.shape} {where} and {other[0]} {other[1]}: `shape` is that of "
                             "the whole tensor, the same on all ranks")
        if fault := coverage_fault(name, first.shape, each, "on no rank"):
            raise ValueError(f"{fault}: ranks that hold the same name each other in `replicas`, and one of them owns "
                             "it; all others hold different parts, which together are the whole")


def check_ranks(comm: "Communicator", specs: Any, counts: bool = True) -> None:
    """Call `check_replicas`, on every rank of `comm`, with the specs of all of them, and `check_specs` with those of
    ranks that pass `counts`: the others, for data parallelism, have the same again. A rank alone, in a dry run, has
    nobody to ask."""
    if not comm.has_others:
        return
    everyone = gather_results(comm, lambda: [counts, [astuple(spec) for spec in specs]])
    found = {rank: [ShardSpec(*each) for each in mine] for rank, (_, mine) in enumerate(everyone)}
    check_replicas(found)
    check_specs({rank: mine for rank, mine in found.items() if everyone[rank][0]})


def check_replicas(specs: Any) -> list[tuple[int, ShardSpec]]:
    """Return [(rank, spec)], one for all replicas of a part. ValueError unless all that one names name the same."""
    holders = {}
    for rank, each in sorted((specs if isinstance(specs, dict) else dict(enumerate(specs))).items()):
        for spec in each:
            holders.setdefault((spec, None if spec.replicas else rank), []).append(rank)
    for (spec, _), ranks in holders.items():
        if spec.replicas and sorted(spec.replicas) != ranks:
            raise ValueError(f"{spec.name}: ranks {ranks} name ranks {list(spec.replicas)} as replicas of elements "
                             f"[{spec.first}, {spec.end}], and not all of these do: each has to hold the same elements "
                             "and to name the same replicas, itself included")
    return [(rank, spec) for (spec, _), ranks in holders.items() for rank in (ranks[:1] if spec.replicas else ranks)]


def coverage_fault(name: str, shape: Sequence[int], pieces: Any, nowhere: Any) -> str | None:
    """Return a sentence unless `pieces`, [(ShardSpec, words for where it is)], have each element of the tensor once."""
    for fused in {spec.fused for spec, _ in pieces if spec.fused}:
        pieces = [(spec.apart(*fused), where) for spec, where in pieces]
        shape = pieces[0][0].shape
    blocks = {} if math.prod(shape) == 0 or any(spec.numel for spec, _ in pieces) else {
        ((0,) * len(shape), tuple(shape), ()): []}
    for spec, where in pieces:
        if spec.numel:
            blocks.setdefault((spec.offsets, spec.lengths, spec.order), []).append((spec.first, spec.end, where))
    for (offsets, lengths, _), spans in blocks.items():
        of = "" if lengths == tuple(shape) else f" of its block of {lengths} at {offsets}"
        reached, before = 0, None
        for first, end, where in [*sorted(spans), (math.prod(lengths),) * 2 + (nowhere,)]:
            if first < reached and where != nowhere:
                return f"{name}: elements {first} … {min(end, reached) - 1}{of} are {before} and {where}"
            if first > reached:
                return f"{name}: elements {reached} … {first - 1}{of} are {nowhere}"
            reached, before = end, where
    for ((a, n, _), one), ((b, m, _), other) in itertools.combinations(blocks.items(), 2):
        if all(max(i, j) < min(i + k, j + h) for i, k, j, h in zip(a, n, b, m, strict=True)):
            return (f"{name}: its blocks of {n} at {a}, {one[0][2]}, and of {m} at {b}, {other[0][2]}, "
                    "have elements in common")
    if (there := sum(math.prod(lengths) for _, lengths, _ in blocks)) < math.prod(shape):
        return f"{name}: {math.prod(shape) - there} of its {math.prod(shape)} elements are {nowhere}"
    return None
