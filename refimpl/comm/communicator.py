"""Collectives over torch.distributed that count what they put on the wire.

All follow one rule: a collective does not change its argument; the result is a new tensor, or `out` if it is given.
`out` may be the argument itself, `comm.all_reduce(x, out=x)`, where the result has its shape (not in all_to_all and
send_recv); or overlap it in this rank's chunk: all_gather's x in its `out`, reduce_scatter's `out` in its x. With
`async_op=True` the call returns a Handle at once, whose `wait()` returns the result; until then neither read `out` nor
write to the argument. Autograd does not differentiate through collectives.

Every tracker counts what the communicator allocates (results, staging copies, contiguous copies) as "communication".
"""

import torch
import torch.distributed as dist
from torch import Tensor, strided
from torch._subclasses.fake_tensor import FakeTensor

from .. import memory
from ..memory.spans import started
from .backend import pairwise
from .backend.groups import check_members, check_peer, new_group
from .backend.tensors import NAMED, as_bytes, check_out, describe, reduction, resolved, same_memory
from .backend.versions import all_gather_single, lend, reduce_scatter_single, unrecorded, unseen, watched
from .handle import Handle, landed
from .matching import CheckedReceive, check_match, send_header
from .traffic import COLLECTIVES, Traffic, ring_traffic

IN_PLACE = ("all_reduce", "broadcast")  # torch reads from and writes to one tensor


class Communicator:
    """Connects this rank to the N − 1 others with which it calls collectives. `launch` makes it.

    - `rank`, `world_size`: this rank's number in this communicator, and N.
    - `ranks`: the numbers of all N in the world that `launch` made (a sub-group has fewer ranks than the world).
    - `device`: where this rank computes (`torch.device`).

    Ranks in arguments (`src`, `dst`, `split`) are numbers in this communicator. CUDA tensors travel by NCCL when each
    rank has a GPU of its own, else through host memory, where gloo takes them.
    """

    def __init__(self, rank, world_size, device="cpu", group=None, *, ranks=None, debug=False, parent=None):
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.ranks = tuple(ranks or range(world_size))
        self._group, self._debug, self._parent = group, debug, parent
        self._sent = dict.fromkeys(COLLECTIVES, 0)
        self._pending = set()  # handles dropped before `wait()`
        self._receives = {}  # debug mode: src -> receives that have not begun
        self._nccl = group is not None and "nccl" in dist.get_backend_config(group)
        self._gather, self._scatter = ((all_gather_single, reduce_scatter_single) if self._nccl else
                                       (pairwise.all_gather, pairwise.reduce_scatter))
        if self._nccl and world_size > 1:
            self._meet()  # NCCL connects a group in its first call; if that were a send, it would wait for all ranks

    # --- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, x, op="sum", *, out=None, async_op=False):
        """Reduce x over ranks by `op` (sum, avg, max, min or product); every rank gets the result. Shape of x.

        ValueError for an unknown op, a dtype that cannot be reduced, or an average of integers. On bool tensors sum
        and max mean any, product and min mean all.
        """
        x, reduce_op = self._given(x), reduction(op, x)
        out = self._result(out, x.shape, x, "all_reduce")
        return self._run("all_reduce", x, out, async_op, lambda source, landing, group, later:
                         dist.all_reduce(landing, reduce_op, group, later), op)

    def reduce_scatter(self, x, op="sum", *, out=None, async_op=False):
        """Reduce x over ranks; rank r gets chunk r of the result, of N along dim 0: (N·n, …) -> (n, …).

        ValueError if N does not divide the size of dim 0 (pad it), and as for all_reduce.
        """
        x, reduce_op = self._given(x), reduction(op, x)
        out = self._result(out, (self._chunk(x), *x.shape[1:]), x, "reduce_scatter")
        return self._run("reduce_scatter", x, out, async_op, lambda source, landing, group, later:
                         self._scatter(landing, source, reduce_op, group, later), op)

    def all_gather(self, x, *, out=None, async_op=False):
        """Concatenate every rank's x along dim 0, on every rank: (n, …) -> (N·n, …), scalars -> (N,).

        x has the same shape on every rank.
        """
        x = self._given(x)
        x = x if x.dim() else x.reshape(1)
        n, *rest = x.shape
        out = self._result(out, (self.world_size * n, *rest), x, "all_gather")
        return self._run("all_gather", x, out, async_op, lambda source, landing, group, later:
                         self._gather(landing, source, group, later))

    def all_to_all(self, x, *, out=None, async_op=False):
        """Exchange chunks: chunk s of rank r's x becomes chunk r of rank s's result, of N along dim 0. Shape of x.

        ValueError if N does not divide the size of dim 0.
        """
        x = self._given(x)
        self._chunk(x)
        out = self._result(out, x.shape, x, "all_to_all")
        return self._run("all_to_all", x, out, async_op, lambda source, landing, group, later:
                         dist.all_to_all_single(landing, source, None, None, group, later))

    def broadcast(self, x, src, *, out=None, async_op=False):
        """Copy rank src's x to every rank. On the others x gives the shape and dtype of the result."""
        x, src = self._given(x), self._peer(src, "src")
        out = self._result(out, x.shape, x, "broadcast")
        return self._run("broadcast", x, out, async_op, lambda source, landing, group, later:
                         dist.broadcast(landing, None, group, later, src), None, src)

    def barrier(self):
        """Wait until every rank has called it. Moves no tensor and counts no bytes."""
        if self._debug:
            check_match(self, "barrier")
        self._meet()

    # --- from one rank to another --------------------------------------------------------------------------------

    def send(self, x, dst, *, async_op=False):
        """Send x to rank dst, which calls recv. Returns None, or a Handle."""
        x, dst = self._given(x), self._peer(dst, "dst", other=True)
        return self._exchange(x, dst, None, None, None, async_op)

    def recv(self, like, src, *, out=None, async_op=False):
        """Receive the tensor that rank src sends; it has the shape, dtype and device of `like`."""
        like, src = self._given(like), self._peer(src, "src", other=True)
        return self._exchange(None, None, self._result(out, like.shape, like, "recv"), like, src, async_op)

    def send_recv(self, x, dst, like, src, *, out=None, async_op=False):
        """Send x to rank dst and receive from rank src, both at once. Returns the received tensor.

        In a ring, where all ranks `send` before they `recv`, each could wait forever for the next.
        """
        x, dst = self._given(x), self._peer(dst, "dst", other=True)
        like, src = self._given(like), self._peer(src, "src", other=True)
        out = self._result(out, like.shape, like, "recv")
        check_out("send_recv", x, out, self.rank)
        return self._exchange(x, dst, out, like, src, async_op)

    # --- sub-groups and bytes ------------------------------------------------------------------------------------

    def split(self, ranks):
        """Make a communicator of some of the ranks, in ascending order; returns None on a rank that is not one of them.

        Every rank of this communicator calls it. All may pass the same `ranks`, or each those of its own sub-group:
        `comm.split([0, 1] if comm.rank < 2 else [2, 3])`. ValueError for a rank that does not exist, one twice, or
        none; CollectiveMismatch if the members of a sub-group pass different `ranks`.
        """
        members = self._members(ranks)
        if self._debug:
            check_match(self, "split")
        with unseen():
            group = new_group(self, members)
        if group is None:
            return None
        return Communicator(members.index(self.rank), len(members), self.device, group, debug=self._debug, parent=self,
                            ranks=[self.ranks[member] for member in members])

    @property
    def traffic(self):
        """Return the bytes that this rank has sent in this communicator and its sub-groups, as a ring sends them."""
        return Traffic(self._sent)

    def reset_traffic(self):
        """Set this communicator's counts to zero. Those of the communicator that it was split from do not change."""
        self._sent = dict.fromkeys(COLLECTIVES, 0)

    def __repr__(self):
        of = f" (world ranks {', '.join(map(str, self.ranks))})" if self._parent is not None else ""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size}{of}, {self.device})"

    def __deepcopy__(self, memo):
        return self  # connections cannot be copied; so `memory.dry_run(step, comm)` counts in `comm` itself

    # --- how a collective runs -----------------------------------------------------------------------------------

    def _meet(self):
        with unseen():
            dist.barrier(self._group, device_ids=[self.device.index] if self._nccl else None)

    def _run(self, collective, x, out, async_op, call, op=None, src=0):
        """Count the bytes, then run `call(source, landing, group, async_op)`: it reads x from `source`, and writes the
        result to `landing`."""
        self._count(collective, out.nbytes if collective == "all_gather" else x.nbytes, x.itemsize, src)
        span = started(collective, x, out)
        if self._debug:
            check_match(self, collective, x, op, src)
        source, landing = self._ready(x, out, collective in IN_PLACE)
        given, taken = (source, landing) if x.dtype in NAMED else (as_bytes(source), as_bytes(landing))
        if not async_op and not watched() and span is None:
            call(given, taken, self._group, False)
            return out if landing is out else landed(landing, out)
        lent, references = lend(given, taken)
        handle = Handle([unrecorded(call, *lent, self._group, True)], out, landing, lent, references, self._pending,
                        span)
        return handle if async_op else handle.wait()

    def _exchange(self, x, dst, out, like, src, async_op):
        """Send x to dst, unless x is None, and receive into `out` from src, unless `out` is None."""
        works, wanted, source, landing = [], [], None, None
        if x is not None:
            self._count("send", x.nbytes)
            source = self._source(x)
            works += [send_header(self, x, dst)] if self._debug else []
            wanted.append(dist.P2POp(dist.isend, as_bytes(source), group=self._group, group_peer=dst))
        if out is not None:
            landing = self._landing(out)
            if self._debug:
                works.append(CheckedReceive(self, like, src, as_bytes(landing)))
            else:
                wanted.append(dist.P2POp(dist.irecv, as_bytes(landing), group=self._group, group_peer=src))
        works += dist.batch_isend_irecv(wanted) if wanted else []
        if not async_op and not watched():
            for work in works:
                work.wait()
            return out if landing is out else landed(landing, out)
        handle = Handle(works, out, landing, [source], pending=self._pending)
        return handle if async_op else handle.wait()

    def _count(self, collective, nbytes, itemsize=1, src=0):
        sent = ring_traffic(collective, nbytes, self.world_size, self.rank, itemsize, src)
        comm = self
        while comm is not None:
            comm._sent[collective] += sent
            comm = comm._parent

    def _ready(self, x, out, in_place=False):
        """Return (source, landing): x where the backend can read it, and a tensor like `out` that it can write to.

        With `in_place` both are one tensor, which holds x.
        """
        staged = self._staged(out)  # x is on the same device
        plain = out.is_contiguous() and not (staged or out.requires_grad or out.is_neg() or out.is_conj())
        landing = out if plain else self._landing(out)
        if not in_place:
            return x if x.is_contiguous() and not staged else self._source(x), landing
        if landing is not x and not same_memory(landing, x):
            landing.copy_(x)
        return landing, landing

    def _result(self, out, shape, x, collective):
        """Return `out`, or a new tensor if it is None. Raises TypeError or ValueError if `out` does not fit."""
        if out is None:
            return memory.mark(torch.empty(shape, dtype=x.dtype, device=x.device), "communication")
        if out is x and collective in IN_PLACE and x.is_contiguous():  # fast path
            return out
        if not isinstance(out, Tensor):
            raise TypeError(f"out={type(out).__name__}: expected a tensor")
        if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
            raise ValueError(f"out has {describe(out)}: expected {describe(x, shape)}")
        check_out(collective, x, out, self.rank)
        return out

    def _source(self, x):
        """Return x where the backend can read it: contiguous, and on the host if it cannot read x's device."""
        if x.is_contiguous() and not self._staged(x):
            return x
        there = x.to("cpu", copy=True) if self._staged(x) else x
        return memory.mark(there.contiguous(), "communication")

    def _landing(self, out):
        """Return `out`, or a new tensor like it if the backend cannot write to `out`."""
        staged = self._staged(out)
        if out.is_contiguous() and not (staged or out.is_neg() or out.is_conj()):
            return out.detach() if out.requires_grad else out
        device = "cpu" if staged else out.device
        return memory.mark(torch.empty(out.shape, dtype=out.dtype, device=device), "communication")

    def _staged(self, x):
        """Tell whether x is copied through host memory, as gloo needs it for CUDA tensors."""
        return x.is_cuda and not self._nccl

    def _given(self, x):
        """Return x without autograd. TypeError if a collective cannot move it."""
        if type(x) is Tensor and x.dtype in NAMED and x.layout is strided and not (
                x.requires_grad or x.is_meta or x.is_neg() or x.is_nested):  # fast path
            return x
        if not isinstance(x, Tensor):
            raise TypeError(f"a collective moves tensors, and this is {type(x).__name__}: pass torch.tensor(…)")
        if x.layout is not strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
            raise TypeError(f"a collective moves dense tensors, and this one is {kind}")
        if self._group is not None and (isinstance(x, FakeTensor) or x.is_meta):
            raise TypeError("a fake or meta tensor has no data to send: give the dry run a "
                            "FakeCommunicator(rank, world_size)")
        return resolved(x.detach() if x.requires_grad else x)

    # --- bad input -----------------------------------------------------------------------------------------------

    def _chunk(self, x):
        if x.dim() == 0 or x.shape[0] % self.world_size:
            raise ValueError(f"shape {tuple(x.shape)}: the size of dim 0 has to be a multiple of "
                             f"world_size={self.world_size}, one chunk for each rank; pad it")
        return x.shape[0] // self.world_size

    def _peer(self, rank, name, other=False):
        return check_peer(rank, self.world_size, name, self.rank if other else None)

    def _members(self, ranks):
        return check_members(ranks, self.world_size)
