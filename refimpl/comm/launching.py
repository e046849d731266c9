"""Run a function on N ranks, each with a Communicator: from a notebook's cell, a script, a test, or under torchrun."""

import datetime
import os
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist

from ..phantom.status import pretending, running
from ..ranks import World, run
from .communicator import Communicator
from .hang_diagnosis import deadlock, deserted, mismatch, pages, waits

# Variables of whoever has started this process among others: torchrun, SLURM, Open MPI, others' MPI.
STARTED = {"RANK", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
NCCL = "cpu:gloo,cuda:nccl"


def launch(fn: Callable[..., Any], world_size: int, *args: object, device: str | None = None, timeout: float = 60,
           limit: float | None = None, debug: bool | None = None) -> list[Any]:
    """Run `fn(comm, *args)` on `world_size` ranks and return what each returned, in rank order.

    Each rank is a process of its own on this machine, with a `Communicator` that connects it to the others. `fn` and
    `args` are copied to each rank, so `fn` may be defined in a notebook's cell, and what a rank changes does not
    change here. What it returns is copied back; CUDA tensors arrive on the host. What ranks print appears here,
    labelled, in rank order: the lowest rank that still runs is shown as it prints, the others after it. All ranks begin
    with the same random numbers, on a GPU as on a CPU.

    - `device`: `"cpu"`; `"cuda"`, one GPU for each rank, or shared by several ranks if there are too few; `"cuda:i"`,
      that one for all. By default `"cuda"` if there is a GPU. It is `comm.device`, and the rank's current device.
    - `timeout`: seconds for which no rank computes, prints or ends a collective, before the ranks count as hung; None
      for never. A rank computes while it and its child processes, but those in a session of their own, use more than
      1 % of a core. (So does a rank that waits for its own GPU: there `limit` ends a hang.) A rank in `compute`, or
      that waits for a transfer over a `Link` to end, goes on, too.
    - `limit`: seconds that `fn` may take on all ranks, whatever they do; None for no limit.
    - `debug`: compare, before each collective, what the ranks are about to do. A mismatch then raises
      CollectiveMismatch, which names the ranks that differ; otherwise it may hang or return garbage. By default True
      if the environment has REFIMPL_COMM_DEBUG=1.

    NCCL connects ranks that have a GPU each, gloo all others. CUDA tensors then go through host memory, since NCCL
    refuses two ranks on one GPU.

    Raises RankError if a rank raises, exits, is killed, hangs (the message shows where), returns while others wait for
    it in a collective, or returns an unpicklable value; the error names that rank, and all others are ended. If ranks
    hang or lose their connections because they began different collectives, it is a CollectiveMismatch with both
    orders. No process is left, whatever happens. Before any process is started, raises ValueError for an invalid
    `world_size`, `device`, `timeout` or `limit`, and TypeError for an `fn` or argument that cannot be pickled; the
    message names the variable.

    Under `torchrun` (RANK, WORLD_SIZE and MASTER_ADDR are in the environment), and as one of several tasks of SLURM or
    processes of MPI, no process is started: each calls `fn` in the world that is there, over however many hosts, and
    gets the results of all ranks. Ranks that do not come together, or differ in a version or in the script, are named
    by a RankError before `fn` is called. `timeout` is as above, but that what ranks print is no sign, and that a save
    or a load may take half an hour; `limit` has no effect. When a rank fails, is killed, hangs or returns early, each
    rank raises a RankError that names it and its host, and a rank that waits elsewhere is interrupted; one that is
    stopped, or a host that is cut off, is named after 30 s without a word.
    """
    check(fn, world_size, timeout=timeout, limit=limit)
    world_size = int(world_size)
    timeout, limit = (float("inf") if seconds is None else float(seconds) for seconds in (timeout, limit))
    debug = os.environ.get("REFIMPL_COMM_DEBUG") == "1" if debug is None else bool(debug)
    if STARTED & set(os.environ) and inside_torchrun():
        from .torchrun import run_under_torchrun

        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        return run_under_torchrun(fn, world_size, args, *place(ranks_here, device), timeout, debug)
    return run(fn, ConnectedWorld(*place(world_size, device), debug), args, timeout, limit)


def inside_torchrun():
    """Tell whether torchrun started this process, or SLURM or MPI among others, whose variables then become its."""
    from .hosts import schedulers

    os.environ.update(schedulers.variables())
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


class ConnectedWorld(World):
    """Ranks connected by torch.distributed, each with a Communicator. `devices`: one for each rank."""

    folders = (os.path.dirname(__file__),)
    hint = "launch(…, debug=True) compares what ranks are about to do before each collective, and names who differs"

    def __init__(self, devices, backend, debug=False):
        super().__init__(len(devices))
        self.devices, self.backend, self.debug = devices, backend, debug

    def connect(self, rank, store, record):
        """Connect this process to the other ranks; return its Communicator."""
        device = torch.device(self.devices[rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.manual_seed(torch.initial_seed())  # else each process draws a seed of its own there
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        forever = datetime.timedelta(days=365)  # `ranks.run` enforces the timeout
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.size, timeout=forever)
        return Communicator(rank, self.size, device, dist.group.WORLD, debug=self.debug, pages=pages(record))

    def disconnect(self):
        """Close this process's connections."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def explain(self, records):
        """Return the CollectiveMismatch of ranks that began different collectives, or None."""
        return mismatch(records)

    def waits(self, records):
        """Return {rank: the collective that it waits in}."""
        return waits(records)

    def stuck(self, records, returned):
        """Return the RankError for ranks that wait in a collective which some of `returned` have not begun, or that all
        wait in collectives which others have not begun; else None."""
        return deserted(records, returned) if returned else deadlock(records)


def place(world_size, device=None, gpus=None):
    """Choose where ranks run: ([device of each rank], torch's name of the backend).

    `gpus`: how many there are, by default those of this machine. ValueError for a device that is not there, or that
    ranks cannot use.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    if device is None:
        device = "cuda" if gpus else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: ranks run on 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: ranks run on 'cpu' or 'cuda'")
    if device.type == "cpu":
        return ["cpu"] * world_size, "gloo"
    if (device.index or 0) >= gpus:
        raise ValueError(f"device={str(device)!r}: this machine has {gpus} CUDA GPU{'s' * (gpus != 1)}")
    if device.index is not None:
        return [str(device)] * world_size, _backend(world_size == 1)
    return [f"cuda:{rank % gpus}" for rank in range(world_size)], _backend(world_size <= gpus)


def _backend(apart):
    """NCCL for ranks that have a GPU each, unless it computes nothing: gloo goes through the host's memory. Ranks that
    are not there take what NCCL takes."""
    return NCCL if pretending() or (apart and not running()) else "gloo"


def check(fn, world_size, caller="launch", **seconds):
    """Raise TypeError or ValueError for what `launch`, or another caller, cannot run."""
    if not callable(fn):
        raise TypeError(f"{caller}({type(fn).__name__}, …): expected a function fn(comm, *args)")
    if not isinstance(world_size, Integral) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected an integer of at least 1")
    for name, value in seconds.items():
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool) or not value > 0):
            raise ValueError(f"{name}={value!r}: expected a number of seconds above 0, or None for no limit")
