"""qgZ: gradients are reduced by all_to_all of blocks in int8 or int4, and added up in fp32.

A ring that reduces adds a part at each hop, and would round N − 1 times. Here each rank encodes its N chunks once, all
ranks exchange them, and each decodes N payloads of its own shard and takes their mean:

    one level       all_to_all                     (N−1) · P(n)             n = Ψ/N numbers of a shard, P(n) bytes
    two levels      all_to_all in a machine        (S−1) · R · P(n)         S ranks in each of R machines, N = S · R
                    all_to_all between them        (R−1) · P(n)

On two levels the mean of a machine is encoded again, so a gradient is rounded twice; between machines a rank sends S
times less. Rank t of a machine gets the chunks of all ranks t, in every machine: the order of chunks is changed while
they are encoded. "ZeRO++" (Wang et al. 2023), section 3.3 and figure 8's reordering.

Where all ranks of a group need the whole mean, as replicas of a shard do (`hybrid`) and data parallelism, it is the
same, and an all_gather of the means, encoded once more: 2(R−1) · P(n/R). All ranks decode the same payloads.
"""

from typing import NamedTuple

import torch

from ...comm import Communicator
from ...comm.agreement import check_same
from ...comm.handle import Then
from ...comm.two_level import levels
from ...common.marks import mark
from .codec import BlockCodec


class ReduceGroups(NamedTuple):
    """The N ranks of a reduction. On two levels rank s + S · r is rank s of `intra` and rank r of `inter`; on one,
    `intra` is `comm`, and `inter` None."""

    comm: Communicator
    intra: Communicator
    inter: Communicator | None = None


class QuantizedReduce:
    """The communication hook of an engine that reduces gradients by a BlockCodec (`zero/internals/hook`), at any stage.

    - `codec`: of gradients, by default 8 bits; the paper takes `BlockCodec(bits=4)`.
    - `ranks_per_machine`: S, for two levels: ranks S·i … S·i + S − 1 are those of machine i. By default one level.

    With `shards` and `replicas` the reduction between replicas is quantised, too. ValueError if S does not divide the
    ranks; CollectiveMismatch names ranks with other options; RuntimeError for the hook of another engine.
    """

    reduces_shards = active = encodes = True

    def __init__(self, codec=None, ranks_per_machine=None):
        self.codec, self.ranks_per_machine = BlockCodec() if codec is None else codec, ranks_per_machine
        self.ranks = None
        if not isinstance(self.codec, BlockCodec):
            raise TypeError(f"codec={codec!r}: expected a BlockCodec, such as BlockCodec(bits=4)")

    def __repr__(self):
        return f"QuantizedReduce({self.codec!r}, ranks_per_machine={self.ranks_per_machine})"

    @property
    def about(self):
        """Return what has to be the same on all ranks."""
        return repr(self)

    def attach(self, comm, layouts):
        """Learn the ranks; all call it."""
        if self.ranks is not None:
            raise RuntimeError(f"{self!r} is another engine's hook already: make one for each engine")
        check_same(comm, "hook", self.about)
        two = self.ranks_per_machine not in (None, 1, comm.world_size)
        self.ranks = ReduceGroups(comm, *levels(comm, self.ranks_per_machine)) if two else ReduceGroups(comm, comm)

    def reduce_scatter(self, key, flat, dtype, label):
        """Encode a bucket to be reduced to shards; `begin()` sends. The handle's `wait()` returns this rank's, (n/N,)
        in `dtype`."""
        return reduce_scatter(self.ranks, self.codec, flat, flat.numel() // self.ranks.comm.world_size, dtype, label)

    def all_reduce(self, key, flat, dtype, label):
        """Encode a bucket to be averaged; `begin()` sends. The handle's `wait()` returns it, (n,) in `dtype`."""
        return all_reduce(self.ranks, self.codec, flat, torch.empty_like(flat, dtype=dtype), label)

    def between(self, replicas):
        """Return what reduces shards over `replicas`, of hybrid sharding."""
        return Replicas(replicas, self.codec)

    def step(self):
        """No-op: nothing is kept from step to step."""

    def drop(self):
        """No-op: nothing is kept."""

    def state_tensors(self):
        """Return {}: nothing is kept."""
        return {}

    def load_state_tensors(self, tensors):
        """No-op: nothing is kept."""


class Replicas:
    """Stands for the communicator of replicas where a shard is reduced."""

    def __init__(self, comm, codec):
        self._comm, self._codec = comm, codec

    def all_reduce(self, x, op, *, out, async_op, label):
        """Launch the average of x over the replicas, into `out`."""
        return all_reduce(ReduceGroups(self._comm, self._comm), self._codec, x, out, label).begin()


class Exchange:
    """A reduction whose gradients are encoded. `begin()` launches it; its result then goes through `finish`."""

    def __init__(self, launch, finish):
        self._launch, self._finish, self._handle = launch, finish, None

    def begin(self):
        """Send. Return the handle itself."""
        if self._handle is None:
            self._handle = Then(self._launch(), self._finish)
            self._launch = self._finish = None
        return self

    def wait(self):
        """Return the result."""
        return self.begin()._handle.wait()


class Ready:
    """A handle of what needs no collective."""

    def __init__(self, result):
        self._result = result

    def begin(self):
        """Return the handle itself."""
        return self

    def wait(self):
        """Return the result."""
        return self._result


@torch.no_grad()
def reduce_scatter(ranks, codec, flat, m, dtype, label=""):
    """Encode flat (n,) for a mean over the ranks, of which rank r gets numbers r·m … r·m + m − 1, as far as there are
    that many. Return a handle: `begin()` sends, and `wait()` returns them in `dtype`."""
    comm, N = ranks.comm, ranks.comm.world_size
    if N == 1:
        return Ready(flat.to(dtype))
    own, p = max(0, min(m, flat.numel() - comm.rank * m)), codec.payload_bytes(m)
    S = ranks.intra.world_size
    sent, flat_numel = _payloads(N, p, flat.device), flat.numel()  # `mean` must not hold flat
    for machine in range(N // S):  # the payload for rank t of machine j is number j among those for rank t
        chunk = flat[machine * S * m : (machine + 1) * S * m]
        for part, rows in _rows(chunk, sent.view(S, N // S, p)[:, machine], m):
            codec.encode(part, rows, m)

    @torch.no_grad()
    def mean(received):
        if ranks.inter is not None:
            received = _between(ranks, codec, received.view(S, N // S, p), flat_numel, m, label)
        mine = torch.empty(1, own, dtype=dtype, device=received.device)
        codec.decode(received.view(1, S if ranks.inter is None else N // S, p), mine, m)
        return mine[0]

    return Exchange(lambda: ranks.intra.all_to_all(sent.view(-1), async_op=True, label=label), mean)


def _between(ranks, codec, received, numel, m, label):
    """Reduce what this machine's ranks sent, (S, R, p), chunk by chunk; return what the other machines sent, (R·p,)."""
    S, R, p = received.shape
    sent, partial = _payloads(R, p, received.device), torch.empty(1, m, device=received.device)
    for machine in range(R):
        part = partial[:, : max(0, numel - (machine * S + ranks.intra.rank) * m)]
        codec.decode(received[None, :, machine], part, m)
        codec.encode(part, sent[machine : machine + 1], m)
    del part, partial  # before the payloads of other machines come
    return ranks.inter.all_to_all(sent.view(-1), label=label)


@torch.no_grad()
def all_reduce(ranks, codec, flat, out, label=""):
    """Encode flat (n,) for a mean over the ranks, into `out`, which may be `flat`. Return a handle: `begin()` sends."""
    comm, N = ranks.comm, ranks.comm.world_size
    if N == 1:
        return Ready(out if out is flat else out.copy_(flat))
    m = part_numel(flat.numel(), N)
    p = codec.payload_bytes(m)

    @torch.no_grad()
    def gather(mine):
        payloads = _payloads(N, p, flat.device)
        codec.encode(mine[None], payloads[comm.rank : comm.rank + 1], m)
        comm.all_gather(payloads[comm.rank], out=payloads.view(-1), label=label)
        for part, rows in _rows(out.view(-1), payloads, m):
            codec.decode(rows[:, None], part, m)
        return out

    return Exchange(reduce_scatter(ranks, codec, flat, m, torch.float32, label).begin, gather)


def part_numel(numel, world_size):
    """Return the numbers of a rank's part where `world_size` does not divide them: whole 16 bytes of codes."""
    return -(-numel // (16 * world_size)) * 16


def _rows(flat, payloads, m):
    """Yield flat (at most R·m,) in rows of m numbers, (r, m) and a last one with fewer, each with its payloads."""
    rows = flat.numel() // m if m else 0
    if rows:
        yield flat[: rows * m].view(rows, m), payloads[:rows]
    if rest := flat.numel() - rows * m:
        yield flat[rows * m :].view(1, rest), payloads[rows : rows + 1]


def _payloads(rows, nbytes, device):
    return mark(torch.empty(rows, nbytes, dtype=torch.uint8, device=device), "communication")
