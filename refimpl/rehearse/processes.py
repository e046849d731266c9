"""Scripts that start a process for each GPU: one of them is rehearsed, in this process."""

import multiprocessing.process
import sys
from unittest import mock

from ..memory.tracking.lines import USER, kind_of


class StartsProcesses(RuntimeError):
    """Says that the script trains in processes of its own, and how one of them is rehearsed."""


class OneOf:
    """A context in which `torch.multiprocessing.spawn(train, nprocs=8)` calls `train(rank)`, as one of `world` ranks.

    Without `world`, and for a process that a script starts anew in another way, it raises StartsProcesses: what that
    process takes would not be read, nor what it writes be watched. A library's workers start as ever.
    """

    def __init__(self, world, rank):
        self._world, self._rank, start = world, rank, multiprocessing.process.BaseProcess.start
        of_torch = sys.modules["torch.multiprocessing.spawn"]
        self._patches = [mock.patch.object(module, "start_processes", self._called)
                         for module in (of_torch, sys.modules["torch.multiprocessing"])]
        self._patches.append(mock.patch.object(multiprocessing.process.BaseProcess, "start", _checked(start)))

    def __enter__(self):
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *exception):
        for each in self._patches:
            each.stop()

    def _called(self, fn, args=(), nprocs=1, *others, **options):
        if (self._world or 1) % nprocs:
            raise StartsProcesses(f"the script starts {nprocs} processes, and a rehearsal reads one: with --world "
                                  f"{nprocs}, or a multiple, torch.multiprocessing.spawn calls {fn.__name__} in it")
        fn(self._rank % nprocs, *args)


def _checked(start):
    def start_a_process(process):
        code = getattr(process._target, "__code__", None)
        if getattr(process, "_start_method", "fork") != "fork" and code and kind_of(code.co_filename) == USER:
            name = process._target.__name__
            raise StartsProcesses(f"the script starts a process for {name}, and a rehearsal reads this one alone: have "
                                  f"the script call {name} itself, as torchrun's do, and rehearse it with --world")
        return start(process)
    return start_a_process
