"""Ranks that live as long as the tests: `pooled` is `launch` without its cost, for functions that no fault ends.

A launch forks and connects its ranks, and frees them: 40 ms of CPU each. Here the ranks of each world size are started
once by a `launch` in a thread, and run one function after the other. A function that fails ends them, with the
RankError that `launch` raises; the next call starts others. Tests of faults, of what ranks print, and of what ranks
take over from the caller (environment, directory) use `launch` itself.
"""

import atexit
import gc
import os
import pickle
import signal
import tempfile
import threading
from multiprocessing import connection

import torch
import torch.distributed as dist

from refimpl import comm
from refimpl.comm import Communicator, RankError
from refimpl.ranks.pickling import pack, pack_result

LARGEST = 4  # ranks; larger worlds are launched
SECONDS = 60  # for one function
NAME = "rank pool"  # of the threads
_pools = {}  # world size -> Pool


def pooled(fn, world_size, *args, device=None, debug=None, **how):
    """As `refimpl.comm.launch`; on ranks that live on if they are few and all else is default."""
    if how or world_size > LARGEST or (device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cpu":
        return comm.launch(fn, world_size, *args, device=device, debug=debug, **how)
    if world_size in _pools and not _pools[world_size].lives():
        _pools.pop(world_size).close()
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
        atexit.register(close)  # after the fork server has registered its own end, so before that
    try:
        return _pools[world_size].run(fn, args, bool(debug))
    except RankError:
        _pools.pop(world_size).close()
        raise


def close():
    """End all pools."""
    while _pools:
        _pools.popitem()[1].close()


def pids():
    """Of all ranks that live."""
    return {pid for pool in _pools.values() for pid in pool.pids}


class Pool:
    """Ranks of one world size, and a connection to each."""

    def __init__(self, world_size):
        self._error = None
        with tempfile.TemporaryDirectory() as folder:
            with connection.Listener(os.path.join(folder, "pool"), "AF_UNIX", world_size) as listener:
                self._thread = threading.Thread(target=self._launch, args=(world_size, listener.address), daemon=True,
                                                name=NAME)
                self._thread.start()
                met = {}
                for _ in range(world_size):
                    end = listener.accept()
                    met[end.recv()] = end
        self._ends = [end for _, end in sorted(met.items())]
        self.pids = {pid for _, pid in met}

    def _launch(self, world_size, address):
        try:
            comm.launch(serve, world_size, address, timeout=None)
        except RankError as error:
            self._error = error

    def run(self, fn, args, debug):
        """What each rank returned. RankError if one did not: then all ranks are gone."""
        task = bytes(pack(fn, args)[0])
        for end in self._ends:
            end.send((task, debug))
        waiting, found = {end: rank for rank, end in enumerate(self._ends)}, {}
        while waiting:
            ready = connection.wait(waiting, SECONDS)
            if not ready:
                raise RankError(f"ranks {list(waiting.values())} did not answer in {SECONDS} s")
            for end in ready:
                try:
                    found[waiting.pop(end)] = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionError):
                    self._thread.join()
                    raise self._error from None
        return [found[rank] for rank in range(len(self._ends))]

    def lives(self):
        """Whether it can run one more function."""
        return self._thread.is_alive()

    def close(self):
        """End the ranks; those that hang, too."""
        for end in self._ends:
            end.close()
        self._thread.join(2)
        if self.lives():
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            self._thread.join()


def serve(world, address):
    """In a rank: one function after the other, each with a new Communicator, until the connection is closed."""
    N, rank, step = world.world_size, world.rank, 0
    threads, seed = torch.get_num_threads(), torch.initial_seed()
    store = dist.distributed_c10d._get_default_store()
    for stream in (1, 2):  # what they print nobody asks for
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    with connection.Client(address, "AF_UNIX") as end:
        end.send((rank, os.getpid()))
        while True:
            try:
                task, debug = end.recv()
            except EOFError:
                return
            step += 1
            gc.collect()
            torch.set_num_threads(threads)
            torch.manual_seed(seed)
            connect_again(dist.PrefixStore(str(step), store), rank, N)
            fn, args = pickle.loads(task)
            value = pack_result(fn(Communicator(rank, N, group=dist.group.WORLD, debug=debug), *args))
            del fn, args
            end.send_bytes(value)


def connect_again(store, rank, world_size):
    """Leave the last function's connections, with whatever nobody has received, and its sub-groups."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
