"""Scripts that start a process for each GPU: one of them is rehearsed, in this process."""

import contextlib
import sys
from multiprocessing.process import BaseProcess
from unittest import mock

from ..memory.tracking.lines import USER, kind_of


class StartsProcesses(RuntimeError):
    """Says that the script trains in processes of its own, and how one of them is rehearsed."""


class OneOf(contextlib.ExitStack):
    """A context in which `torch.multiprocessing.spawn(train, nprocs=8)` calls `train(rank)`, as one of `world` ranks.

    Without `world`, and for a process that a script starts anew in another way, it raises StartsProcesses: what that
    process takes would not be read, nor what it writes be watched. A library's workers start as ever.
    """

    def __init__(self, world, rank):
        super().__init__()
        self._world, self._rank = world, rank

    def __enter__(self):
        for name in ("torch.multiprocessing.spawn", "torch.multiprocessing"):
            self.enter_context(mock.patch.object(sys.modules[name], "start_processes", self._called))
        self.enter_context(mock.patch.object(BaseProcess, "start", _checked(BaseProcess.start)))
        return self

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
