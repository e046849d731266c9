"""Collectives over torch.distributed that count what they put on the wire.

All follow one rule: a collective does not change its argument; the result is a new tensor, or `out` if it is given.
`out` may be the argument itself, `comm.all_reduce(x, out=x)`, where the result has its shape (not in all_to_all and
send_recv); or overlap it in this rank's chunk: all_gather's x in its `out`, reduce_scatter's `out` in its x. With
`async_op=True` the call returns a Handle at once, whose `wait()` returns the result; until then neither read `out` nor
write to the argument. Autograd does not differentiate through collectives. `label` says what the tensor is, for the
order of collectives and for spans of time: `comm.all_gather(shard, label="blocks.3")`; it is the same on all ranks.

Every tracker counts what the communicator allocates (results, staging copies, contiguous copies) as "communication".
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..common.spans import started
from ..phantom.status import pretending
from ..ranks.errors import names
from .backend import pairwise
from .backend.buffers import IN_PLACE, CollectiveBuffers
from .backend.groups import check_members, check_peer, host_group, new_group
from .backend.tensors import NAMED, as_bytes, check_out, reduction
from .backend.torch_internals import all_gather_single, lend, reduce_scatter_single, unrecorded, unseen, watched
from .collective_order import Order
from .handle import Handle, copied_to_out
from .matching import CheckedReceive, check_match, send_header
from .traffic import COLLECTIVES, Traffic, ring_traffic

if TYPE_CHECKING:
    from .link import Link


class Communicator(CollectiveBuffers):
    """Connects this rank to the N − 1 others with which it calls collectives. `launch` makes it.

    - `rank`, `world_size`: this rank's number in this communicator, and N.
    - `ranks`: the numbers of all N in the world that `launch` made (a sub-group has fewer ranks than the world).
    - `device`: where this rank computes (`torch.device`).
    - `order`: which of its collectives this rank has begun (`collective_order.Order`).
    - `has_others`: whether the other ranks are there to be asked, as they are not in a dry run (`fake`).

    Ranks in arguments (`src`, `dst`, `split`) are numbers in this communicator. CUDA tensors travel by NCCL when each
    rank has a GPU of its own, else through host memory, where gloo takes them.
    """

    has_others = True

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu", group: Any = None, *,
                 ranks: Sequence[int] | None = None, debug: bool = False, parent: "Communicator | None" = None,
                 pages: Any = None, hosts: Any = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.ranks = tuple(ranks or range(world_size))
        self._group, self._debug, self._parent = group, debug, parent
        self._host: Any = None  # what `host()` returns, once it was asked
        self._hosts = hosts if parent is None else parent._hosts
        self._pages = parent._pages if pages is None and parent is not None else iter(pages or ())  # for orders
        self.order = Order(next(self._pages, None)).name(zlib.crc32(getattr(group, "group_name", "").encode()),
                                                         names(self.ranks))
        self._link = self._wire = None
        self._sent = dict.fromkeys(COLLECTIVES, 0)
        self._pending = set()  # handles dropped before `wait()`
        self._receives = {}  # debug mode: src -> receives that have not begun
        self._nccl = group is not None and "nccl" in dist.get_backend_config(group)
        whole = self._nccl or pretending()  # messages would wait for ranks that are not there
        messages = pairwise
        if self._hosts is not None and self._hosts.several:
            from .backend.by_host import ByHost

            messages = ByHost.of(self) or pairwise
        self._gather, self._scatter = ((all_gather_single, reduce_scatter_single) if whole else
                                       (messages.all_gather, messages.reduce_scatter))
        if self._nccl and world_size > 1:
            self._meet()  # NCCL connects a group in its first call; if that were a send, it would wait for all ranks

    # --- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, async_op: bool = False,
                   label: str = "") -> Any:
        """Reduce x over ranks by `op` (sum, avg, max, min or product); every rank gets the result. Shape of x.

        ValueError for an unknown op, a dtype that cannot be reduced, or an average of integers. On bool tensors sum
        and max mean any, product and min mean all.
        """
        x, reduce_op = self._without_autograd(x), reduction(op, x)
        out = self._out_or_new(out, x.shape, x, "all_reduce")
        return self._run("all_reduce", x, out, async_op, lambda source, landing, group, later:
                         dist.all_reduce(landing, reduce_op, group, later), op, 0, label)

    def reduce_scatter(self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None,
                       async_op: bool = False, label: str = "") -> Any:
        """Reduce x over ranks; rank r gets chunk r of the result, of N along dim 0: (N·n, …) -> (n, …).

        ValueError if N does not divide the size of dim 0 (pad it), and as for all_reduce.
        """
        x, reduce_op = self._without_autograd(x), reduction(op, x)
        out = self._out_or_new(out, (self._chunk(x), *x.shape[1:]), x, "reduce_scatter")
        return self._run("reduce_scatter", x, out, async_op, lambda source, landing, group, later:
                         self._scatter(landing, source, reduce_op, group, later), op, 0, label)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, async_op: bool = False,
                   label: str = "") -> Any:
        """Concatenate every rank's x along dim 0, on every rank: (n, …) -> (N·n, …), scalars -> (N,).

        x has the same shape on every rank.
        """
        x = self._without_autograd(x)
        x = x if x.dim() else x.reshape(1)
        n, *rest = x.shape
        out = self._out_or_new(out, (self.world_size * n, *rest), x, "all_gather")
        return self._run("all_gather", x, out, async_op, lambda source, landing, group, later:
                         self._gather(landing, source, group, later), None, 0, label)

    def all_to_all(self, x: torch.Tensor, *, out: torch.Tensor | None = None, async_op: bool = False,
                   label: str = "") -> Any:
        """Exchange chunks: chunk s of rank r's x becomes chunk r of rank s's result, of N along dim 0. Shape of x.

        ValueError if N does not divide the size of dim 0.
        """
        x = self._without_autograd(x)
        self._chunk(x)
        out = self._out_or_new(out, x.shape, x, "all_to_all")
        return self._run("all_to_all", x, out, async_op, lambda source, landing, group, later:
                         dist.all_to_all_single(landing, source, None, None, group, later), None, 0, label)

    def broadcast(self, x: torch.Tensor, src: int, *, out: torch.Tensor | None = None, async_op: bool = False,
                  label: str = "") -> Any:
        """Copy rank src's x to every rank. On the others x gives the shape and dtype of the result."""
        x, src = self._without_autograd(x), self._peer(src, "src")
        out = self._out_or_new(out, x.shape, x, "broadcast")
        return self._run("broadcast", x, out, async_op, lambda source, landing, group, later:
                         dist.broadcast(landing, None, group, later, src), None, src, label)

    def barrier(self) -> None:
        """Wait until every rank has called it. Moves no tensor and counts no bytes."""
        with self.order.until_end(self.order.begin("barrier")):
            if self._debug:
                check_match(self, "barrier")
            self._meet()

    # --- from one rank to another --------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, dst: int, *, async_op: bool = False, label: str = "") -> Handle | None:
        """Send x to rank dst, which calls recv. Returns None, or a Handle."""
        x, dst = self._without_autograd(x), self._peer(dst, "dst", other=True)
        return self._exchange(x, dst, None, None, None, async_op, label)

    def recv(self, like: torch.Tensor, src: int, *, out: torch.Tensor | None = None, async_op: bool = False,
             label: str = "") -> Any:
        """Receive the tensor that rank src sends; it has the shape, dtype and device of `like`."""
        like, src = self._without_autograd(like), self._peer(src, "src", other=True)
        return self._exchange(None, None, self._out_or_new(out, like.shape, like, "recv"), like, src, async_op, label)

    def send_recv(self, x: torch.Tensor, dst: int, like: torch.Tensor, src: int, *, out: torch.Tensor | None = None,
                  async_op: bool = False, label: str = "") -> Any:
        """Send x to rank dst and receive from rank src, both at once. Returns the received tensor.

        In a ring, where all ranks `send` before they `recv`, each could wait forever for the next.
        """
        x, dst = self._without_autograd(x), self._peer(dst, "dst", other=True)
        like, src = self._without_autograd(like), self._peer(src, "src", other=True)
        out = self._out_or_new(out, like.shape, like, "recv")
        check_out("send_recv", x, out, self.rank)
        return self._exchange(x, dst, out, like, src, async_op, label)

    # --- sub-groups and bytes ------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> "Communicator | None":
        """Make a communicator of some of the ranks, in ascending order; returns None on a rank that is not one of them.

        Every rank of this communicator calls it. All may pass the same `ranks`, or each those of its own sub-group:
        `comm.split([0, 1] if comm.rank < 2 else [2, 3])`. ValueError for a rank that does not exist, one twice, or
        none; CollectiveMismatch if the members of a sub-group pass different `ranks`.
        """
        members = self._members(ranks)
        with self.order.until_end(self.order.begin("split")), unseen():
            if self._debug:
                check_match(self, "split")
            group = new_group(self, members)
        if group is None:
            return None
        return self._lend_link(
            Communicator(members.index(self.rank), len(members), self.device, group, debug=self._debug, parent=self,
                         ranks=[self.ranks[member] for member in members]))

    def host(self) -> "Communicator":
        """Return a communicator of the same ranks for small tensors in host memory, over gloo connections of its own.

        So it works whatever collectives of this one are under way, even where ranks began different ones; and it waits
        for no GPU. All ranks make the first call together, and later ones get the same communicator. What it sends
        counts in `traffic` here, too; what it calls is not in `order`.
        """
        if self._host is None:
            with unseen():
                group = host_group(self)
            self._host = Communicator(self.rank, self.world_size, "cpu", group, debug=self._debug, parent=self,
                                      ranks=self.ranks)
        return self._host

    def for_messages(self) -> "Communicator":
        """Return a communicator of the same ranks whose messages pass each other: this one, or over NCCL `host()`.

        NCCL runs what a rank sends and receives in the order of the calls, and each waits for its other side: a `recv`
        that is posted early holds up a `send` after it. All ranks make the first call together.
        """
        return self.host() if self._nccl else self

    @property
    def link(self) -> "Link | None":
        """Return the `Link` of its transfers, or None: as fast as the machine. Set it on every rank, to the same."""
        return self._link

    @link.setter
    def link(self, link):
        if link is not None and (isinstance(link, type) or not hasattr(link, "wire")):
            raise TypeError(f"link={link!r}: expected a Link(bytes_per_second, latency), or None")
        self.order.begin("link", label=str(link))  # a rank with another link is named, as one with other collectives
        self._wire = link.wire(self._group, self.world_size) if link and self._group and self.world_size > 1 else None
        self._link = link

    def _lend_link(self, group):
        if self.link is not None:
            group.link = self.link
        return group

    @property
    def hosts(self) -> Any:
        """Return the `hosts.facts.Hosts`: on which host each rank of the world is, and what that host has."""
        if self._hosts is None:
            from .hosts.facts import Hosts

            self._hosts = Hosts.one(max(self.ranks) + 1)
        return self._hosts

    @property
    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent in this communicator and its sub-groups, as a ring sends them."""
        return Traffic(self._sent)

    def reset_traffic(self) -> None:
        """Set this communicator's counts to zero. Those of the communicator that it was split from do not change."""
        self._sent = dict.fromkeys(COLLECTIVES, 0)

    @property
    def place(self) -> str:
        """Return this rank for an error, by its number in the world: "rank 1 of 4"; in a sub-group "rank 6 (1 of 2 in
        its group)"."""
        of = f"of {self.world_size}"
        if self.ranks == tuple(range(self.world_size)):
            return f"rank {self.rank} {of}"
        return f"rank {self.ranks[self.rank]} ({self.rank} {of} in its group)"

    def differing(self, values: Sequence[Any]) -> list[int]:
        """Return the ranks, by their numbers in the world, whose value, of one from each rank, is not the first's."""
        return [self.ranks[rank] for rank, each in enumerate(values) if each != values[0]]

    def __repr__(self):
        of = f" (world ranks {', '.join(map(str, self.ranks))})" if self._parent is not None else ""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size}{of}, {self.device})"

    def __deepcopy__(self, memo):
        return self  # connections cannot be copied; so `memory.dry_run(step, comm)` counts in `comm` itself

    # --- how a collective runs -----------------------------------------------------------------------------------

    def _meet(self):
        with unseen():
            dist.barrier(self._group, device_ids=[self.device.index] if self._nccl else None)

    def _run(self, collective, x, out, async_op, call, op=None, src=0, label=""):
        """Begin a collective, then run `call(source, landing, group, async_op)`: it reads x from `source`, and writes
        the result to `landing`."""
        number, span, sent = self._begin(collective, x, out, op, src, label)
        transfers = [self._wire.collective(collective, sent)] if self._wire else []
        if self._debug:
            self.order.wait(number)
            check_match(self, collective, x, op, src)
            self.order.wait(0)
        source, landing = self._source_and_landing(x, out, collective in IN_PLACE)
        given, taken = (source, landing) if x.dtype in NAMED else (as_bytes(source), as_bytes(landing))
        if not async_op and not watched() and span is None and not transfers:
            with self.order.until_end(number):
                call(given, taken, self._group, False)
            return out if landing is out else copied_to_out(landing, out)
        lent, references = lend(given, taken)
        handle = Handle([unrecorded(call, *lent, self._group, True), *transfers], out, landing, lent, references,
                        self._pending, span, self.order, number)
        return handle if async_op else handle.wait()

    def _exchange(self, x, dst, out, like, src, async_op, label):
        """Send x to dst, unless x is None, and receive into `out` from src, unless `out` is None."""
        works, wanted, transfers, source, landing = [], [], [], None, None
        span = self._begin_message(x, out, label)
        if x is not None:
            transfers += [self._wire.send(x.nbytes, dst)] if self._wire else []
            source = self._source(x)
            works += [send_header(self, x, dst)] if self._debug else []
            wanted.append(dist.P2POp(dist.isend, as_bytes(source), group=self._group, group_peer=dst))
        if out is not None:
            landing = self._landing(out)
            transfers += [self._wire.receive(src)] if self._wire else []
            if self._debug:
                works.append(CheckedReceive(self, like, src, as_bytes(landing)))
            else:
                wanted.append(dist.P2POp(dist.irecv, as_bytes(landing), group=self._group, group_peer=src))
        works += [*self._begin_messages(wanted), *transfers]
        if not async_op and not watched() and span is None:
            for work in works:
                work.wait()
            self.order.end()
            return out if landing is out else copied_to_out(landing, out)
        handle = Handle(works, out, landing, [source], pending=self._pending, span=span, order=self.order)
        return handle if async_op else handle.wait()

    def _begin_messages(self, wanted):
        """Begin P2POps; return their works. NCCL has to begin a send and a receive as one; gloo need not, and torch's
        checks of a batch take as long as a small message."""
        if self._nccl:
            return dist.batch_isend_irecv(wanted) if wanted else ()
        return [(self._group.send if each.op is dist.isend else self._group.recv)([each.tensor], each.group_peer, 0)
                for each in wanted]

    def _begin(self, collective, x, out, op, src, label):
        """Count a collective's bytes and record that it begins. Returns its number, its span of time or None, and the
        bytes that this rank sends."""
        sent = self._count(collective, out.nbytes if collective == "all_gather" else x.nbytes, x.itemsize, src)
        number = self.order.begin(collective, x.shape, x.dtype, op, src if collective == "broadcast" else None, label)
        return number, started(collective, x, out, name=label), sent

    def _begin_message(self, x, out, label):
        """Count the bytes of a message. Returns its span of time or None."""
        if x is not None:
            self._count("send", x.nbytes)
        sends = "send" if out is None else "send_recv"
        kind = "recv" if x is None else sends
        return started(kind, *(tensor for tensor in (x, out) if tensor is not None), name=label)

    def _count(self, collective, nbytes, itemsize=1, src=0):
        sent = ring_traffic(collective, nbytes, self.world_size, self.rank, itemsize, src)
        comm = self
        while comm is not None:
            comm._sent[collective] += sent
            comm = comm._parent
        return sent

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
