"""Ranks of a mesh, from a script, a notebook's cell, or under torchrun; an error names places, not numbers alone."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import comm as ranks
from ..comm import RankError

if TYPE_CHECKING:
    from ..mesh import Mesh


def launch(fn: Callable[..., Any], mesh: "Mesh", *args: Any, **how: Any) -> list[Any]:
    """Run `fn(mesh, *args)` on every rank of a Mesh, with the mesh connected; return what each returned, in rank order.

    `how`: `comm.launch`'s device, timeout, limit and debug, which also says what is copied. RankError as there, after
    the places on the mesh of all ranks to blame: `rank 5 (pp 1, dp 0, tp 1)`.
    """
    try:
        return ranks.launch(functools.partial(_connected, fn, mesh), mesh.world_size, *args, **how)
    except RankError as error:
        told = error.__cause__  # a rank that heard of another's failure knows better
        blamed = told.ranks if isinstance(told, RankError) and told.ranks else error.ranks
        if not blamed or mesh.world_size == 1:
            raise
        raise type(error)(f"{', '.join(map(mesh.describe, blamed))} of {mesh!r}: {error}", blamed) from told


def _connected(fn, mesh, comm, *args):
    return fn(mesh.connect(comm), *args)
