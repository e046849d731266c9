"""What may reduce gradients in place of a reducer's own collective: the communication hook of an engine.

    Zero1(model, comm, optimizer, hook=GradientCompressor("topk", 0.05))       # of refimpl.compression

A reducer asks the hook for the average of each complete bucket, and goes on with backward. Whoever writes one fills
this protocol, and imports nothing from here. As DDP's communication hooks: "PyTorch Distributed" (Li et al. 2020).

A hook may have two things more. `encodes`: True if it has read `flat` for the last time when it returns; stages 2 and 3
then free it, and the reducer calls `begin()` of the handle, which sends. `between(replicas)`: returns what reduces the
shards of hybrid sharding, by `all_reduce(shard, "avg", out=shard, async_op=True, label="…")`.
"""

from typing import NamedTuple, Protocol

import torch

from ...comm.agreement import check_same


class BucketLayout(NamedTuple):
    """One bucket, as a hook sees it: `numel` elements, padding and all, and (first element, shape) of each tensor."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    slots: list


class CommunicationHook(Protocol):
    """Reduces buckets. `key` is a bucket's number, from 0; `flat` its gradients, which the hook must not change;
    `dtype` that of the numbers on the wire; `label` its name, in errors."""

    reduces_shards: bool  # whether a rank gets its shard without whole gradients; stages 2 and 3 need that
    active: bool  # whether the hook reduces in this step; if not, gradients are sent as without it
    about: str  # what has to be the same where `state_tensors` are loaded

    def attach(self, comm, layouts):
        """Learn the ranks and the BucketLayouts, once."""

    def all_reduce(self, key, flat, dtype, label):
        """Launch a bucket's average. Return a handle, whose `wait()` returns it: (n,) in `dtype`."""

    def reduce_scatter(self, key, flat, dtype, label):
        """Launch a bucket's reduction to shards. Return a handle, whose `wait()` returns this rank's: (n/N,)."""

    def step(self):
        """The step is made: what the hook keeps of these gradients counts."""

    def drop(self):
        """The gradients are dropped: what was to be kept of those since the last step does not count."""

    def state_tensors(self):
        """Return {name: tensor} of what this rank keeps, of the same names and shapes at any time."""

    def load_state_tensors(self, tensors):
        """Take what `state_tensors` returned."""


def attach(hook, comm, buckets, stage):
    """Tell a hook, if there is one, the ranks and the buckets. TypeError for what is no hook, and for stages 2 and 3,
    which have no whole gradients, with a hook that needs them. CollectiveMismatch if ranks have other hooks: they would
    add payloads that do not belong together."""
    if hook is not None:
        if isinstance(hook, type) or not hasattr(hook, "attach"):
            raise TypeError(f"hook={hook!r}: expected an object that reduces buckets, such as "
                            'GradientCompressor("topk") of refimpl.compression')
        if stage >= 2 and not hook.reduces_shards:
            raise TypeError(f"hook={hook!r}: it needs whole gradients, and stage {stage} reduces each bucket to "
                            "shards: use DataParallel, Zero1, or an algorithm that reduces a shard")
        hook.attach(comm, [BucketLayout(bucket.numel, bucket.dtype, bucket.device,
                                        [(slot.first, slot.parameter.shape) for slot in bucket.slots])
                           for bucket in buckets])
    check_same(comm, "hook", "None" if hook is None else hook.about)
