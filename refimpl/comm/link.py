"""A link of a given speed: how long each collective takes on it, in closed form.

On one machine the messages between ranks take next to no time, and a rank that waits for one gives its core to another.
So what a technique hides behind computation does not show. A communicator can be given a slower link:

    def train(comm):                                                 # in each rank, the same in all
        comm.link = Link(bytes_per_second=10e6, latency=1e-3)        # None: as fast as the machine again
        handle = comm.all_gather(shard, async_op=True)
        compute(0.2)                                                 # `comm.compute`: computation of a known time
        handle.wait()                                                # max(0.2, the link's seconds) after it began

What is modelled. A collective begins when its last rank has begun it and the one before has ended; `seconds` later it
ends, at the same moment on all ranks. So a communicator has one queue for its collectives. Each rank has another for
the messages that it sends: a message leaves when it is sent and those before have left, whether or not its receiver is
there yet. Its receiver has it `seconds` later; so long lasts the `send`, too. `wait()` sleeps until then: what was
computed since the beginning is not waited for again.

What is not. Collectives do not slow down messages, nor one communicator another: each sub-group has a queue of its own,
as if by wires of its own. `split` hands the link on, and the sub-group may be given another (`row.link = …`): tensor
parallelism inside a machine, data parallelism between machines. Nothing is charged for `barrier`, `split`, and what
goes by `host()`. A collective is never quicker than the machine itself. Times are the host's, and the clock is one for
all ranks, so they are all on one machine. A FakeCommunicator keeps the link and takes no time.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any

from .backend.wire import Wire
from .traffic import COLLECTIVES


@dataclass(frozen=True)
class Link:
    """Describes what connects each rank to the next: `bytes_per_second` that it sends, and seconds of `latency`.

    ValueError for a rate that is not above 0, or a latency that is below 0. `float("inf")` is a rate, too.
    """

    bytes_per_second: float
    latency: float = 0.0

    def __post_init__(self):
        if not _is_number(self.bytes_per_second) or not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second={self.bytes_per_second!r}: expected a number above 0")
        if not _is_number(self.latency) or not 0 <= self.latency < float("inf"):
            raise ValueError(f"latency={self.latency!r}: expected a number of seconds, 0 or more")

    def seconds(self, collective: str, sent_bytes: float, world_size: int) -> float:
        """Compute how long a collective takes in which each rank sends `sent_bytes` (`ring_traffic`).

            steps · latency + sent bytes / rate

        This is the α–β model of a ring: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
        operations in MPICH", sections 3 and 4.1, without the time for additions. If ranks send different numbers of
        bytes, the largest decides.
        """
        return steps(collective, world_size) * self.latency + sent_bytes / self.bytes_per_second

    def wire(self, group: Any, world_size: int) -> Any:
        """Return what serves the transfers of one communicator over this link, on this rank."""
        return Wire(self, group, world_size)


def steps(collective, world_size):
    """Count the messages that follow one upon the other in a collective on N = `world_size` ranks.

        all_gather, reduce_scatter, all_to_all    N−1
        all_reduce                                2(N−1)
        broadcast                                 N−1, along a chain, in pieces so small that only their way counts
        send                                      1

    ValueError for another collective.
    """
    hops = {"all_reduce": 2 * (world_size - 1), "send": 1 if world_size > 1 else 0}
    if collective not in COLLECTIVES:
        raise ValueError(f"no steps are known for {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    return hops.get(collective, world_size - 1)


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)
