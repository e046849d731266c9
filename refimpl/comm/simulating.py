"""N ranks in one process: real tensors and real arithmetic, no processes and no connections.

    simulate(fn, world_size, *args)     what `launch` does, in a moment, for small tensors on a CPU

A FakeCommunicator's other ranks hold what this one holds, so a gradient that nobody sums over ranks looks right there.
Here each rank is a thread with tensors of its own. They run one at a time: a rank runs until it waits for others, then
the next one does. So every run of a function goes the same way.
"""

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .backend.tensors import same_memory
from .backend.torch_internals import unseen
from .communicator import IN_PLACE, Communicator
from .errors import CollectiveMismatch
from .handle import Handle
from .launching import check
from .matching import described, mismatch
from .turns import Turns

REDUCE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
REDUCE_BOOL = {"sum": torch.logical_or, "max": torch.logical_or, "min": torch.logical_and,
               "product": torch.logical_and}


def simulate(fn: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
    """Run `fn(comm, *args)` on `world_size` ranks that are threads of this process; return what each returned, in rank
    order.

    Each rank has its own copy of `args`, its own state of torch's and Python's random numbers, and a
    `SimulatedCommunicator`, on the CPU. What `fn` reaches otherwise is one for all ranks: build models inside of it.
    Results of collectives do not depend on chance: sums are added in rank order.

    RankError names the rank that raised. CollectiveMismatch names ranks that begin different collectives, or tensors
    that do not fit, and ranks that wait for what nobody will begin. ValueError for a bad `world_size`, TypeError for
    an `fn` that cannot be called.
    """
    check(fn, world_size, "simulate")
    turns = Turns(int(world_size))
    shared = _Shared(turns, range(world_size))
    given = [copy.deepcopy(args) for _ in range(world_size)]
    return turns.run(lambda rank: fn(SimulatedCommunicator(rank, shared), *given[rank]))


class _Shared:
    """Holds what ranks of one communicator share: collectives under way, messages that wait. `ranks`: of the world"""

    def __init__(self, turns, ranks):
        self.turns, self.ranks = turns, tuple(ranks)
        self.meetings, self.mail = {}, defaultdict(dict)  # number → _Meeting; (from, to) → {number: tensor}
        self._host = None

    @property
    def host(self):
        """Return what the ranks share for tensors in host memory."""
        self._host = self._host or _Shared(self.turns, self.ranks)
        return self._host


class _Meeting:
    """Holds a collective in which ranks meet: it happens when the last one has come, or fails on all of them."""

    def __init__(self, size, act):
        self._size, self._act = size, act
        self.posts, self.error, self.result = {}, None, None  # rank -> (what it begins, what it gives)

    def post(self, rank, what, *given):
        """Come; `what`: text of what this rank begins. The last one acts for all."""
        self.posts[rank] = what, given
        if self.done:
            with unseen(), torch.no_grad():
                said = {rank: what for rank, (what, _) in sorted(self.posts.items())}
                self.error = mismatch(said) if len(set(said.values())) > 1 else None
                if self.error is None:
                    self.result = self._act([given for _, (_, given) in sorted(self.posts.items())])

    @property
    def done(self):
        """Tell whether all have come."""
        return len(self.posts) == self._size


class _Waiting:
    """Waits for one rank, as a work of a Handle: until `ready()`, then `finish()`."""

    def __init__(self, turns, rank, ready, what, finish):
        self._turns, self._rank, self._ready, self._what, self._finish = turns, rank, ready, what, finish

    def wait(self):
        self._turns.wait(self._rank, self._ready, self._what)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self):
        return self._finish is None


class SimulatedCommunicator(Communicator):
    """Connects a rank to others that are threads of this process; `simulate` makes it. Same methods, errors of debug
    mode, and traffic. A `link` is kept, and nothing takes time."""

    def __init__(self, rank: int, shared: Any, parent: Communicator | None = None) -> None:
        super().__init__(rank, len(shared.ranks), ranks=shared.ranks, parent=parent)
        self._shared, self._met, self._posted = shared, itertools.count(), defaultdict(itertools.count)

    def split(self, ranks: Sequence[int]) -> "SimulatedCommunicator | None":
        """Make a communicator of some of the ranks, as `Communicator.split` does."""
        members = self._members(ranks)
        with self.order.until_end(self.order.begin("split")):
            made = self._meet("split", self._split, members)
        if self.rank not in members:
            return None
        for rank in members:
            if made[rank][0] != members:
                raise CollectiveMismatch(f"split: rank {self.ranks[self.rank]} makes a sub-group of ranks {members}, "
                                         f"and rank {self.ranks[rank]} one of {made[rank][0]}", [self.ranks[rank]])
        return self._lend_link(SimulatedCommunicator(members.index(self.rank), made[self.rank][1], self))

    def _split(self, posts):
        """Return [(members, what they share) of each rank]."""
        shared = {}
        for (members,) in posts:
            if tuple(members) not in shared:
                shared[tuple(members)] = _Shared(self._shared.turns, [self.ranks[member] for member in members])
        return [(members, shared[tuple(members)]) for (members,) in posts]

    def host(self) -> "SimulatedCommunicator":
        """Return a communicator of the same ranks, always the same one, whose collectives pass those of this one."""
        if self._host is None:
            self._host = SimulatedCommunicator(self.rank, self._shared.host, self)
        return self._host

    def _meet(self, what="barrier", act=lambda posts: None, *given):
        meeting, work = self._post(what, act, *given)
        work.wait()
        return meeting.result

    def _post(self, what, act, *given):
        """Come to this rank's next meeting in this communicator; return (it, a work to wait for it)."""
        number = next(self._met)
        meeting = self._shared.meetings.setdefault(number, _Meeting(self.world_size, act))
        meeting.post(self.ranks[self.rank], what, *given)
        if meeting.done:
            del self._shared.meetings[number]
        return meeting, self._waiting(lambda: meeting.done, what, lambda: _raise(meeting.error))

    def _waiting(self, ready, what, finish):
        return _Waiting(self._shared.turns, self.ranks[self.rank], ready, what, finish)

    def _run(self, collective, x, out, async_op, call, op=None, src=0, label=""):
        number, span, _ = self._begin(collective, x, out, op, src, label)
        source, landing = self._source_and_landing(x, out, collective in IN_PLACE)
        what = described(collective, x, op, src if collective == "broadcast" else None)
        _, work = self._post(what, functools.partial(_act, collective, op, src), source, landing)
        handle = Handle([work], out, landing, [source], None, self._pending, span, self.order, number)
        return handle if async_op else handle.wait()

    def _exchange(self, x, dst, out, like, src, async_op, label):
        span, mail, works, landing = self._begin_message(x, out, label), self._shared.mail, [], None
        if x is not None:
            with unseen(), torch.no_grad():
                mail[self.rank, dst][next(self._posted["to", dst])] = self._source(x).clone()
        if out is not None:
            landing, number, box = self._landing(out), next(self._posted["from", src]), mail[src, self.rank]
            what = f"recv of shape {tuple(like.shape)} from rank {self.ranks[src]}"
            works.append(self._waiting(lambda: number in box, what, lambda: self._land(box, number, landing, src)))
        handle = Handle(works, out, landing, [x], None, self._pending, span, self.order)
        return handle if async_op else handle.wait()

    def _land(self, box, number, landing, src):
        sent, (me, them) = box.pop(number), (self.ranks[self.rank], self.ranks[src])
        if (said := described("send", sent)) != described("send", landing):
            raise CollectiveMismatch(f"ranks {them} and {me} do not match:\n  rank {them}: {said}\n  rank {me}: "
                                     f"{described('recv', landing)}", (them, me))
        landing.copy_(sent)


def _act(collective, op, src, posts):
    """Do a collective for all ranks. `posts`: [(source, landing) of each rank]."""
    sources, N = [source for source, _ in posts], len(posts)
    if collective == "all_reduce":
        results = [_reduced(op, sources)] * N
    elif collective == "reduce_scatter":
        results = _reduced(op, sources).chunk(N) if sources[0].numel() else [landing for _, landing in posts]
    elif collective == "all_gather":
        results = [torch.cat(sources)] * N
    elif collective == "all_to_all":
        chunks = [source.view(N, source.shape[0] // N, *source.shape[1:]).clone() for source in sources]
        results = [torch.cat([each[rank] for each in chunks]) for rank in range(N)]
    else:
        results = [sources[src]] * N
    for result, (_, landing) in zip(results, posts, strict=True):
        if not same_memory(result, landing):
            landing.copy_(result.view(landing.shape))


def _reduced(op, sources):
    function = (REDUCE_BOOL if sources[0].dtype is torch.bool else REDUCE)[op]
    total = functools.reduce(function, sources[1:], sources[0].clone())
    return total / len(sources) if op == "avg" else total


def _raise(error):
    if error is not None:
        raise error
