"""Arranges ranks in a mesh, with one axis for each way to split training: which ranks split what, and with whom.

    Mesh(dp=2, tp=2, pp=2)              tp 0   tp 1
                         pp 0   dp 0      0      1        a group of tp: 0 1    (one row)
                                dp 1      2      3        a group of dp: 0 2
                         pp 1   dp 0      4      5        a group of pp: 0 4
                                dp 1      6      7        dp × tp:       0 1 2 3

    rank = tp + TP · (cp + CP · (dp + DP · pp))

Ranks that exchange most are neighbours, where links are fastest: tensor parallelism sends activations in every layer,
context parallelism keys and values, data parallelism gradients once a step, a pipeline one activation a stage. After
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (Narayanan et al. 2021), section 3.

Data parallelism itself may have two levels, `shards`: ranks in groups of so many neighbours cut the states among them,
and dp / shards groups hold the same (HSDP). Mesh(dp=8, shards=4) has two replicas.
"""

import itertools
import math
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .comm.communicator import Communicator

HOST = "host"
ADVICE = {"tp": "its activations go to and fro in every layer: make tp divide the ranks of each host",
          "shards": "shards=\"host\" takes as many as share one"}
AXES = ("tp", "cp", "dp", "pp")  # the fastest first
LEVELS = ("shards", "replicas")  # of dp, the faster first
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
NAMES = {**{axis: axis for axis in AXES}, "shards": "shard", "replicas": "replica"}  # of one place
SHOWN = 4  # rows and columns of a text at each side of "…"
DRAWN = 256  # ranks in a figure


@dataclass(frozen=True)
class Mesh:
    """Says which rank stands where, for pp · dp · cp · tp ranks: arithmetic, without a process. The articles call it
    MixedParallelConfig.

    - `dp`, `tp`, `pp`, `cp`: ranks of one group of data, tensor, pipeline and context parallelism.
    - `shards`: ranks of dp among which ZeRO cuts its states; by default all of them. It divides dp. "host": as many as
      share a host, which is known when the mesh is connected.

    A kind of group is an axis: "tp", "cp", "dp" or "pp"; or a level of dp: "shards" or "replicas". Several kinds
    together are a group over all of them. TypeError for a size that is no integer; ValueError for one below 1, and for
    shards that do not divide dp.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    shards: int | None = None

    def __post_init__(self):
        given = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp")}
        given |= {} if self.shards in (None, HOST) else {"shards": self.shards}
        for name, size in given.items():
            if not isinstance(size, Integral) or isinstance(size, bool):
                raise TypeError(f"Mesh({name}={size!r}): expected an integer, the number of ranks in a group")
            if size < 1:
                raise ValueError(f"Mesh({name}={size}): expected at least 1; 1 does not split")
            object.__setattr__(self, name, int(size))
        if self.dp % given.get("shards", 1):
            raise ValueError(f"Mesh(dp={self.dp}, shards={self.shards}): the shards have to divide dp, since every "
                             "replica has as many")

    @property
    def world_size(self) -> int:
        """Return the number of all ranks, pp · dp · cp · tp."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def sizes(self) -> dict[str, int]:
        """Return {kind: ranks of its group}, the axes from the fastest on, then the levels of dp."""
        shards = self.dp if self.shards in (None, HOST) else self.shards
        return {**{axis: getattr(self, axis) for axis in AXES}, "shards": shards, "replicas": self.dp // shards}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return {kind: where the rank stands on it}. ValueError for a rank that the mesh does not have."""
        if not isinstance(rank, Integral) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank!r}: expected one from 0 to {self.world_size - 1}, of {self!r}")
        found, rest = {}, int(rank)
        for axis in AXES:
            rest, found[axis] = divmod(rest, getattr(self, axis))
        found["replicas"], found["shards"] = divmod(found["dp"], self.sizes["shards"])
        return found

    def rank_at(self, **coordinates: Any) -> int:
        """Return the rank at these places on the axes, 0 where none is given: `mesh.rank_at(dp=1, tp=3)`. The inverse
        of `coordinates`. ValueError for an unknown axis, and for a place beyond its end."""
        rank, step = 0, 1
        for axis in AXES:
            at, size = coordinates.pop(axis, 0), getattr(self, axis)
            if at not in range(size):
                raise ValueError(f"{axis}={at!r}: expected a place from 0 to {size - 1}, of {self!r}")
            rank, step = rank + int(at) * step, step * size
        if coordinates:
            raise ValueError(f"no axis {', '.join(coordinates)}: expected {', '.join(AXES)}")
        return rank

    def describe(self, rank: int) -> str:
        """Return the rank with its places on axes that are split: 'rank 5 (pp 1, dp 0, tp 1)'."""
        at = self.coordinates(rank)
        places = ", ".join(f"{axis} {at[axis]}" for axis in reversed(AXES) if self.sizes[axis] > 1)
        return f"rank {rank}" + f" ({places})" * bool(places)

    def groups(self, *kinds: Any) -> list[tuple[int, ...]]:
        """Return all groups of a kind, or of several kinds together, as tuples of ascending ranks. They are disjoint,
        and every rank is in one: ranks of a group differ in `kinds` alone. `mesh.groups("dp", "cp")`: gradients are
        summed over each of these. ValueError for an unknown kind, or none."""
        along = self._along(kinds)
        found = {}
        for rank in range(self.world_size):
            found.setdefault(self._apart(rank, along), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def ranks(self, *kinds: Any, rank: int) -> tuple[int, ...]:
        """Return the group of `rank`, as a tuple of ascending ranks, `rank` among them."""
        along, here = self._along(kinds), self.coordinates(rank)
        places = [range(self.sizes[axis]) if axis in along else (here[axis],) for axis in ("tp", "cp", *LEVELS, "pp")]
        return tuple(sorted(self.rank_at(tp=tp, cp=cp, dp=shard + self.sizes["shards"] * replica, pp=pp)
                            for tp, cp, shard, replica, pp in itertools.product(*places)))

    def _along(self, kinds):
        """Return the axes, and levels for dp, along which ranks of one group differ."""
        if not kinds or any(kind not in (*AXES, *LEVELS) for kind in kinds):
            raise ValueError(f"a group along {kinds}: expected some of {', '.join((*AXES, *LEVELS))}")
        return {each for kind in kinds for each in (LEVELS if kind == "dp" else (kind,))}

    def _apart(self, rank, along):
        """Return what all ranks of one group have in common."""
        return tuple(place for axis, place in self.coordinates(rank).items() if axis not in along and axis != "dp")

    def connect(self, comm: "Communicator") -> "ConnectedMesh":
        """Return the mesh of the ranks of `comm`, with a Communicator for each group of this rank (`ConnectedMesh`).

        All ranks of `comm` call it. ValueError, naming the sizes, if the mesh has more ranks than `comm`, or fewer.
        """
        return ConnectedMesh(self, comm)

    def get_parallel_group(self, *kinds: Any) -> "Communicator":
        """Raise RuntimeError: a mesh that is not connected has groups of numbers alone."""
        raise RuntimeError(f"{self!r} is not connected: call mesh = {self!r}.connect(comm) on every rank; without "
                           "ranks, mesh.groups says who is in which group")

    # --- pictures ----------------------------------------------------------------------------------------------------

    def __repr__(self):
        sizes = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "shards")
                 if getattr(self, name) not in (1, None) or name == "shards" and self.shards]
        return f"Mesh({', '.join(sizes)})"

    def __str__(self):
        """Return the mesh as text: a column for each place on the fastest axis, a row for each on the others."""
        across, down = self._across_and_down()
        table = [["", *(f"{NAMES[across]} {at}" for at in range(self.sizes[across]))]]
        for ranks in self.groups(across):
            here = self.coordinates(ranks[0])
            table.append([" ".join(f"{NAMES[axis]} {here[axis]}" for axis in down), *map(str, ranks)])
        table = [_elided(row) for row in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([f"{self!r}: {self.world_size} rank{'s' * (self.world_size > 1)}", *_elided(lines)])

    def _across_and_down(self):
        """Return the axis of the columns, and those of the rows, the slowest first: of more than one rank each."""
        split = [level for axis in AXES for level in (LEVELS if axis == "dp" and self.shards else (axis,))]
        fastest, *others = [axis for axis in split if self.sizes[axis] > 1] or ["tp"]
        return fastest, others[::-1]

    def draw(self) -> "Figure":
        """Draw the mesh once for each axis of more than one rank, a colour for each of its groups. Returns a matplotlib
        Figure. ValueError for more than 256 ranks."""
        if self.world_size > DRAWN:
            raise ValueError(f"{self!r} has {self.world_size} ranks: expected at most {DRAWN} in a figure; "
                             "print(mesh) leaves out the middle")
        across, down = self._across_and_down()
        kinds, rows = [across, *reversed(down)], self.groups(across)
        from .common.figure import MemoryFigure  # which loads matplotlib

        figure = MemoryFigure(figsize=(0.6 + (0.45 * len(rows[0]) + 0.5) * len(kinds), 0.8 + 0.32 * len(rows)),
                              layout="constrained", facecolor="white")
        figure.labels = [f"groups of {kind}" for kind in kinds]
        for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            group_of = {rank: i for i, ranks in enumerate(self.groups(kind)) for rank in ranks}
            for row, ranks in enumerate(rows):
                for column, rank in enumerate(ranks):
                    axes.barh(row, 0.94, left=column, height=0.84, color=COLOURS[group_of[rank] % len(COLOURS)])
                    axes.text(column + 0.47, row, str(rank), ha="center", va="center", fontsize=8)
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_title(f"groups of {kind}", fontsize=9)
            axes.axis("off")
        return figure

    def _repr_png_(self):
        return self.draw()._repr_png_() if self.world_size <= DRAWN else None


class ConnectedMesh(Mesh):
    """The mesh of the ranks of a Communicator, seen from this rank. `Mesh.connect` makes it.

    - `comm`: the Communicator of all ranks; a rank of the mesh is a number in it.
    - `here`: {kind: where this rank stands on it}.
    """

    def __init__(self, mesh: Mesh, comm: "Communicator") -> None:
        if mesh.world_size != comm.world_size:
            product = " · ".join(f"{axis}={getattr(mesh, axis)}" for axis in reversed(AXES))
            raise ValueError(f"{mesh!r} has {product} = {mesh.world_size} ranks, and the communicator has "
                             f"{comm.world_size}: choose sizes whose product is {comm.world_size}, or launch "
                             f"{mesh.world_size} ranks")
        mesh = _on_hosts(mesh, comm)
        super().__init__(mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.shards)
        # A frozen dataclass refuses to set attributes.
        self.__dict__.update(comm=comm, here=self.coordinates(comm.rank), _made={})
        for kind in ("tp", *(("shards",) if self.shards else ())):
            if comm.rank == 0:
                comm.hosts.warn_of_crossing(f"{mesh!r}, {kind}", _in_world(mesh, comm, kind), ADVICE[kind])
        for kinds in (*((axis,) for axis in AXES), ("dp", "cp"), *((level,) for level in LEVELS)):
            self.get_parallel_group(*kinds)

    def get_parallel_group(self, *kinds: Any) -> "Communicator":
        """Return the Communicator of this rank's group of a kind, or of several kinds together: ("dp", "cp").

        Those of each kind, and of dp × cp, have been made by `connect`. Other kinds together are made in the first
        call, which all ranks of the mesh make; later calls return the same Communicator.
        """
        mine = self.ranks(*kinds)
        if len(mine) == self.world_size:
            return self.comm
        differ = frozenset(axis for axis in self._along(kinds) if self.sizes[axis] > 1)  # alike on all ranks
        if differ not in self._made:
            self._made[differ] = self.comm.split(mine)
        return self._made[differ]

    def ranks(self, *kinds: Any, rank: int | None = None) -> tuple[int, ...]:
        """Return the group of this rank, or of `rank`, as numbers in `comm`, which `ShardSpec.replicas` takes. All
        ranks of a tensor-parallel group hold the same weight of a norm: its replicas are `mesh.ranks("tp")`."""
        return super().ranks(*kinds, rank=self.comm.rank if rank is None else rank)


def _in_world(mesh, comm, kind):
    """Return the groups of a kind, as ranks of the world."""
    return [[comm.ranks[rank] for rank in group] for group in mesh.groups(kind)]


def _on_hosts(mesh, comm):
    """Return the mesh, with as many shards as share a host if they are "host"."""
    if mesh.shards != HOST:
        return mesh
    meshes = [Mesh(mesh.dp, mesh.tp, mesh.pp, mesh.cp, shards) for shards in range(mesh.dp, 0, -1)
              if mesh.dp % shards == 0]
    return next(each for each in meshes if all(len(comm.hosts.groups(group)) == 1
                                               for group in _in_world(each, comm, "shards")))


def _elided(items):
    """Return the items without the middle, for which "…" stands, if they are many."""
    return items if len(items) <= 2 * SHOWN + 1 else [*items[:SHOWN + 1], "…", *items[-SHOWN:]]
