"""Real ranks from a notebook's cell, and collectives that count their bytes.

Order of reading: `papers/collectives` (the idea in one screen), then

    traffic           what each collective sends as a ring: the closed forms, and the mapping that holds the counts
    ring              all_reduce from nothing but send and recv, where 2(N−1)/N comes from
    tree              all_reduce along a tree: few steps, many bytes
    two_level         all_reduce inside machines, then between them
    communicator      the collectives, over torch.distributed
    launching         a function on N ranks; the processes themselves are in `refimpl.ranks`
    simulating        N ranks in one process, with real arithmetic, for small tensors; `turns`: they run one at a time
    fake              a communicator without the other ranks, for dry runs
    matching          debug mode: ranks that call different collectives are named
    handle            a collective under way
    link              a slow link between ranks: when each transfer ends
    timed_compute     computation of a known time
    rank_timeline     what was computed, what was on the wire meanwhile, and what was waited for
    collective_order  which collectives a rank has begun, in what order; two orders told apart
    hang_diagnosis    the orders of ranks that hang, were killed, or returned too early
    same_model        models that differ are named before they are cut
    texts             results and exceptions of each rank, told to all
    torchrun          the same call under torchrun, SLURM and MPI
    hosts/            ranks on several hosts: who is where, who differs, who failed
    drawing           collectives as a picture
    backend/          machinery: which tensors gloo and NCCL take, messages between ranks, the link's queues,
                      sub-groups, torch's internals
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily
from .communicator import Communicator
from .errors import CollectiveMismatch, RankError
from .handle import Handle
from .traffic import COLLECTIVES, Traffic, ring_traffic

if TYPE_CHECKING:
    from .fake import FakeCommunicator
    from .launching import launch
    from .link import Link
    from .ring import ring_all_reduce
    from .simulating import SimulatedCommunicator, simulate
    from .timed_compute import Delay, compute
    from .tree import tree_all_reduce
    from .two_level import two_level_all_reduce

__getattr__, __dir__ = lazily(__name__, {
    ".fake": "FakeCommunicator", ".launching": "launch", ".link": "Link", ".ring": "ring_all_reduce",
    ".simulating": "SimulatedCommunicator simulate", ".timed_compute": "Delay compute", ".tree": "tree_all_reduce",
    ".two_level": "two_level_all_reduce"})
__all__ = [
    "COLLECTIVES", "CollectiveMismatch", "Communicator", "Delay", "FakeCommunicator", "Handle", "Link", "RankError",
    "SimulatedCommunicator", "Traffic", "compute", "launch", "ring_all_reduce", "ring_traffic", "simulate",
    "tree_all_reduce", "two_level_all_reduce",
]
