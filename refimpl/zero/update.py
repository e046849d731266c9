"""The optimizer on this rank's shards: stages 1 to 3 update them bucket by bucket.

A piece is the flat part of a parameter that a shard has. The optimizer sees each piece as a parameter of its own, in
the param group of the parameter that it belongs to. Adam, AdamW, SGD and all that treat each element by itself give the
same numbers on pieces as on whole tensors; `internals/elementwise` finds out those that do not.
"""

import contextlib
import itertools

import torch

from ..common.marks import mark
from ..optimizer_subset import snapshot_groups, step_subset
from .internals.writes import follow

LOW = (torch.float16, torch.bfloat16)


class ShardedUpdate:
    """An optimizer of one rank's pieces of all buckets.

    - `pieces[bucket]`: [(Piece, Parameter)]. The optimizer updates the Parameter, a view of the bucket's master, if it
      has one, or else of its shard.
    - `masters[bucket]`: the fp32 copy of a 16-bit shard. It is rounded into the shard after each step. (At stage 3 the
      shard itself is fp32, if it stays on the device: it is rounded for each gather.) With a `device`, such as the
      host, each shard has a copy there, which is updated in its place.
    - `gradients[bucket]`: this rank's shard of the averaged gradients, on the same device.
    - `group_names`: the names of the whole parameters in each param group, also of those that this rank has no part of.
    - `factor`: what gradients are multiplied by in the next step, in the dtype of what is updated: of a scaled loss.
    """

    def __init__(self, buckets, shards, rank, optimizer, groups, named, stored=None, device=None):
        self.shards, self.stored, self.device, self.factor = shards, stored, device, 1.0
        self.pieces, self.masters, self.gradients, self.optimizer = {}, {}, {}, None
        for bucket in buckets:
            with self.loaded(bucket):
                self.pieces[bucket] = [(piece, _piece_of(self._master_or_shard(bucket), piece, bucket.dtype))
                                       for piece in bucket.pieces(rank)]
        self.optimizer = optimizer(self._groups(groups, named))  # after the masters: it may make states at once

    def _master_or_shard(self, bucket):
        """Return what holds a bucket's elements: its master, made here, or its shard."""
        shard, low = self.shards[bucket], self.shards[bucket].dtype in LOW
        if bucket not in self.masters and (low or self.device is not None):
            master = torch.empty_like(shard, dtype=torch.float32 if low else None, device=self.device).copy_(shard)
            self.masters[bucket] = mark(master, "optimizer state")
        return self.masters.get(bucket, shard)

    def _groups(self, groups, named):
        """Return the caller's groups, each parameter replaced by this rank's piece of it, if it has one."""
        own = {piece.slot.parameter: own for pairs in self.pieces.values() for piece, own in pairs}
        given = [{"params": [p for _, p in named]}] if groups is None else groups(named)
        given, names = [{**group, "params": list(group["params"])} for group in given], {p: name for name, p in named}
        self.group_names = [[names[p] for p in group["params"]] for group in given]
        mine = [{**group, "params": [own[p] for p in group["params"] if p in own]} for group in given]
        if not any(group["params"] for group in mine):  # this rank has no piece, but an optimizer needs a parameter
            mine[0]["params"] = [torch.nn.Parameter(torch.zeros(0))]
        return mine

    @contextlib.contextmanager
    def loaded(self, bucket, following=None, only=None):
        """Load what the store has of a bucket for the context, and prefetch the next: at stage 3 its parameters, and
        all that a `StoredUpdate` keeps there."""
        with contextlib.nullcontext() if self.stored is None else self.stored.loaded(bucket, following, only):
            yield

    def add_gradients(self, bucket, shard):
        """Add this rank's shard of a bucket's averaged gradients to that of earlier micro-batches."""
        shard = shard if self.device is None else shard.to(self.device)
        with self.loaded(bucket, only="gradients"):
            if bucket in self.gradients:
                self.gradients[bucket].add_(shard)
            else:
                self.set_gradients(bucket, shard)

    def set_gradients(self, bucket, shard):
        """Let the gradients of a bucket's pieces be views of `shard`."""
        self.gradients[bucket] = shard
        for piece, own in self.pieces[bucket]:
            part, own.grad = shard[piece.place : piece.place + piece.end - piece.first], None
            own.grad_dtype, own.grad = part.dtype, part  # grad_dtype cannot change while there is a gradient

    def copy_gradients(self, bucket):
        """Copy a shard that is part of a whole buffer, which is about to be freed; one apart may be in a store."""
        shard = self.gradients.get(bucket)
        if shard is not None and shard.untyped_storage().nbytes() > shard.nbytes:
            self.set_gradients(bucket, mark(shard.clone(), "gradients"))

    def multiply_gradients(self, factor):
        """Multiply gradients by `factor` in the next norm and step."""
        self.factor = factor

    def with_gradients(self):
        """Yield (bucket, pieces) of all buckets, with their gradients."""
        for bucket, following in itertools.pairwise([*self.pieces, None]):
            with self.loaded(bucket, following, only="gradients"):
                yield bucket, self.pieces[bucket]

    def drop_gradients(self, bucket):
        """Drop the gradients of a bucket."""
        self.gradients.pop(bucket, None)
        for _, own in self.pieces[bucket]:
            own.grad = None

    def step(self, used, updated):
        """Update this rank's shard of each bucket, as far as parameters are `used`. `updated(bucket)` then launches the
        all_gather of all shards, while the next bucket is updated, and returns its Handle or None."""
        before = snapshot_groups(self.optimizer)
        handles = []
        for bucket, following in itertools.pairwise([*self.pieces, None]):
            with self.loaded(bucket, following):
                for piece, own in self.pieces[bucket]:
                    gradient, own.grad = own.grad, None
                    if gradient is not None and piece.slot.parameter in used:  # else no decay, no momentum
                        wide = gradient.to(own.dtype)  # in fp32 for this bucket alone
                        own.grad_dtype, own.grad = own.dtype, wide if self.factor == 1 else wide * self.factor
                step_subset(self.optimizer, (own for _, own in self.pieces[bucket]), before)
                self.round_master(bucket)
                self.drop_gradients(bucket)  # now, so that the next bucket's temporaries may take its bytes
            handles.append(updated(bucket))
        for handle in filter(None, handles):
            handle.wait()

    def follow(self, bucket):
        """Take what a module wrote to its parameters from a bucket's shard into its master."""
        follow(self.masters[bucket], self.shards[bucket])

    def round_master(self, bucket):
        """Round a bucket's fp32 master into its 16-bit shard. No-op for a bucket without a master."""
        if bucket in self.masters:
            self.shards[bucket].copy_(self.masters[bucket])


def _piece_of(held, piece, dtype):
    """Return the piece of what is held, as a Parameter whose gradient may have another dtype."""
    own = torch.nn.Parameter(held[piece.place : piece.place + piece.end - piece.first])
    if own.dtype != dtype:
        own.grad_dtype = dtype
    return own
