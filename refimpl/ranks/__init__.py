"""Run a function in N processes of this machine, from a notebook's cell, a script or a test; name the rank that fails.

Knows no collective. Whoever calls `run` says how ranks are connected, by a `World`: `comm.launch` gives one that hands
each rank a Communicator, and is what users call.

In the order of reading:

    running, world   the whole of a launch; what its caller provides
    worker           one rank: from the fork to the function, and back with what that returned or raised
    launched_ranks   the caller's side: start the ranks, hear what they say, notice how they end
    signs            for how long no rank has gone on; memory that a rank shares with the caller
    failure_report   from failed ranks to one RankError that names who began it
    crowded          errors of a machine that is full, as a sentence
    output           what ranks print, labelled, in rank order
    pickling         functions, arguments and results as bytes; the variable that cannot be pickled
    forkserver       the caller's side of the process that forks ranks
    forking          that process
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily
from .errors import RankError

if TYPE_CHECKING:
    from .running import run
    from .world import World

__getattr__, __dir__ = lazily(__name__, {".running": "run", ".world": "World"})
__all__ = ["RankError", "World", "run"]
