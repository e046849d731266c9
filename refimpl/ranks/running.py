"""Run a function in every rank of a world, and return what each returned."""

import os
import pickle
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .crowded import open_files_named, temporary_file
from .errors import RankError
from .launched_ranks import LaunchedRanks
from .pickling import pack
from .signs import shared_records
from .worker import LENGTH, Setup

if TYPE_CHECKING:
    from .world import World


def run(fn: Callable[..., Any], world: "World", args: Sequence[Any] = (), timeout: float = 60,
        limit: float = float("inf")) -> list[Any]:
    """Run `fn(connection, *args)` in `world.size` processes; return a list of what each returned, in rank order.

    `connection` is what `world.connect` returns in that process. `timeout`: seconds for which no rank computes, prints
    or changes its record; `limit`: seconds in all, from the moment when all ranks are connected. Infinity for either
    means never. See `comm.launch` for what is copied and what is raised.
    """
    packed, sources = pack(fn, args)
    with open_files_named(world.size), socket.create_server(("127.0.0.1", 0), backlog=world.size) as listener, \
            shared_records(world.size) as (records, read_records):
        setup = pickle.dumps(Setup(world, listener.getsockname()[1], _directory(), list(sys.path), dict(os.environ),
                                   sources, resource.getrlimit(resource.RLIMIT_NOFILE)))
        with temporary_file(LENGTH.pack(len(setup)), setup, packed) as payload, \
                LaunchedRanks(world, payload, records, listener, read_records) as ranks:
            return [unpack(rank, value) for rank, value in enumerate(ranks.results(timeout, limit))]


def unpack(rank, value):
    """Unpickle what `rank` returned. RankError if that fails, as for an exception class with two arguments."""
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RankError(f"rank {rank} returned a value that cannot be unpickled: {type(error).__name__}: {error}",
                        [rank]) from error


def _directory():
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current directory, in which ranks would start, was deleted: os.chdir to one that "
                                "exists") from None
