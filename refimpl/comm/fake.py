"""A communicator without the other ranks: rank r of N, for dry runs and for counting."""

from collections.abc import Sequence
from numbers import Integral

import torch

from .backend.buffers import IN_PLACE
from .backend.tensors import same_memory
from .communicator import Communicator
from .handle import Handle


class FakeCommunicator(Communicator):
    """Stands for rank `rank` of `world_size` without other processes: same methods, shapes and traffic.

    Results are as if every other rank held the same tensors as this one: a sum is N·x, an average x, all_gather N times
    x, and recv a copy of `like`. Fake tensors (`memory.dry_run`) have shapes only, which suffices to know what rank 0
    of 1024 would hold and send. It keeps a `link` and hands it to sub-groups, but nothing takes time.
    """

    has_others = False

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu", *,
                 ranks: Sequence[int] | None = None, parent: Communicator | None = None) -> None:
        if not isinstance(world_size, Integral) or isinstance(world_size, bool) or world_size < 1:
            raise ValueError(f"world_size={world_size!r}: expected an integer of at least 1")
        super().__init__(rank, int(world_size), device, ranks=ranks, parent=parent)
        self._peer(rank, "rank")

    def barrier(self) -> None:
        """Return at once: there is no other rank."""
        self.order.begin("barrier")

    def _staged(self, x):
        return False

    def split(self, ranks: Sequence[int]) -> "FakeCommunicator | None":
        """Make a fake communicator of some of the ranks; returns None if this rank is not one of them."""
        members = self._members(ranks)
        self.order.begin("split")
        if self.rank not in members:
            return None
        return self._lend_link(FakeCommunicator(members.index(self.rank), len(members), self.device, parent=self,
                                                ranks=[self.ranks[member] for member in members]))

    def host(self) -> "FakeCommunicator":
        """Return a fake communicator of the same ranks, always the same one."""
        if self._host is None:
            self._host = FakeCommunicator(self.rank, self.world_size, ranks=self.ranks, parent=self)
        return self._host

    def _run(self, collective, x, out, async_op, call, op=None, src=0, label=""):
        _, span, _ = self._begin(collective, x, out, op, src, label)
        (source, landing), N = self._source_and_landing(x, out, collective in IN_PLACE), self.world_size
        if collective in ("reduce_scatter", "all_to_all"):
            source = source.view(N, x.shape[0] // N, *x.shape[1:])[self.rank]
        if collective in ("all_gather", "all_to_all"):
            self._repeat(source, landing.view(N, *source.shape))
        elif not same_memory(landing, source):
            landing.copy_(source)
        if op == "sum" and x.dtype is not torch.bool:
            landing.mul_(N)
        elif op == "product" and x.dtype is not torch.bool:
            landing.pow_(N)
        return self._answer(source, landing, out, async_op, span)

    def _repeat(self, source, chunks):
        """Copy `source` to each of `chunks`. It may be this rank's own chunk."""
        if not same_memory(chunks[self.rank], source):
            chunks.copy_(source)
            return
        chunks[:self.rank].copy_(source)
        chunks[self.rank + 1:].copy_(source)

    def _exchange(self, x, dst, out, like, src, async_op, label):
        source = landing = None
        span = self._begin_message(x, out, label)
        if x is not None:
            source = self._source(x)
        if out is not None:
            landing = self._landing(out)
            if not same_memory(landing, like):
                landing.copy_(like)
        return self._answer(source, landing, out, async_op, span)

    @staticmethod
    def _answer(source, landing, out, async_op, span=None):
        handle = Handle((), out, landing, [source], span=span)  # holds `source` until `wait()`, as a real one does
        return handle if async_op else handle.wait()
