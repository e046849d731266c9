"""Ranks for tests: a test that runs on each rank, and launches that have to fail; ranks that live as long as the tests:
`pooled` is `launch` without its cost, for functions that no fault ends.

A launch forks and connects its ranks, and frees them: 40 ms of CPU each. Here the ranks of each world size are started
once by a `launch` in a thread, and run one function after the other. A function that fails ends them, with the
RankError that `launch` raises; the next call starts others. Tests of faults, of what ranks print, and of what ranks
take over from the caller (environment, directory) use `launch` itself.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import os
import pickle
import signal
import tempfile
import threading
import time
from multiprocessing import connection

import psutil
import pytest
import torch
import torch.distributed as dist
from patience import within

from refimpl import comm
from refimpl.comm import Communicator, RankError
from refimpl.ranks import forkserver
from refimpl.ranks.pickling import pack, pack_result

forkserver.PRELOADED += ("_pytest.assertion.rewrite",)  # what an assert needs: else 0.2 s of a core in each rank
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
    except BaseException:  # an answer that still comes would be taken for that of the next function
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
                ends = [listener.accept() for _ in range(world_size)]
        met = {end.recv(): end for end in ends}
        self._ends, self.pids = [met[key] for key in sorted(met)], {pid for _, pid in met}

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
    N, rank, step, seed = world.world_size, world.rank, 0, torch.initial_seed()
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
            torch.set_num_threads(1)  # as conftest.py does
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


def on_ranks(world_size, fails=None, error=RankError, then=None, launch=pooled, **how):
    """Decorate a test: it runs on each rank, with its Communicator as its first argument. `world_size` may be the name
    of an argument, which says how many ranks there are; `fails` are the words of the error in which it ends; `then` is
    called here with what each rank returns."""
    def decorate(test):
        @functools.wraps(test)
        def run(**given):
            with pytest.raises(error, match=fails) if fails else contextlib.nullcontext():
                for returned in launch(functools.partial(test, **given), given.get(world_size, world_size), **how):
                    if then is not None:
                        then(returned)

        run.__signature__ = inspect.Signature([*inspect.signature(test).parameters.values()][1:])
        return run

    return decorate


def failure(match, fn, world_size, *args, error=RankError, launch=comm.launch, **how):
    """Return the error of a launch, which has to fail with these words."""
    with pytest.raises(error, match=match) as caught:
        launch(fn, world_size, *args, **how)
    return caught.value


def gone(pids, seconds=60):
    """Whether all of these processes end in time. Whoever adopts one may not ask how it ended: until then it is a
    zombie."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.02)
    return False


def killing(comm):
    """Return a hook that ends rank 1, as if it had crashed."""
    def kill(*_):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def begins():
    """Say on a rank that from now on another may be killed."""
    print("begins", time.time(), flush=True)


def killed_and_named(capfd, fn, *args):
    """Hold that of 4 ranks rank 1, which is killed, is named within five seconds of what the last rank `begins`."""
    failure("rank 1 .*SIGKILL", fn, 4, *args)
    ended = time.time()
    within(ended - max(float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if "begins" in line), 5)


def at_once(collective):
    """Return a mutant of a collective, one that is waited for where it begins."""
    def begin(*args, **how):
        handle = collective(*args, **how)
        handle.wait()
        return handle

    return begin


def alike(comm, x):
    """Whether two ranks have the same tensor."""
    return torch.equal(*comm.all_gather(x[None]))
