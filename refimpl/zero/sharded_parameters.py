"""Parameters in shards (stage 3): how they are laid out in buckets, cut, and made whole for a moment."""

import torch

from ..common.marks import mark
from .gathering import Gathering
from .parameters import broadcast_rest
from .units import frozen_buckets, large_heads, modules_of_units, parameters_of_units, unit_buckets
from .update import LOW


def is_persistent(bucket, threshold):
    """Tell whether a bucket has parameters of fewer than `threshold` elements, which stay whole."""
    return all(slot.parameter.numel() < threshold for slot in bucket.slots)


class ShardedParameters:
    """Keeps this rank's shard of each bucket, `shards[bucket]`. Parameters are views of `whole[bucket]`, a tensor that
    has bytes only while it is gathered, by `gathering`.

    - `comm`: the ranks that cut them, `levels.shards`.
    - `of_unit[unit]`, `units_of[bucket]`: the buckets of a unit, and the units of a bucket that is trained.
    - `trained`, `frozen`: the buckets; those of frozen parameters have shards alone. `frozen_pieces[bucket]`: [(Piece,
      its part of the shard)].
    - `initializer`: what gives values to a model that was built on the meta device, or None.
    """

    def __init__(self, model, levels, named, units, threshold, initializer=None):
        self.model, self.levels, self.comm = model, levels, levels.shards
        self.threshold, self.initializer = threshold, initializer
        self.trained = unit_buckets(named, units, self.comm.world_size, threshold)
        self.frozen = frozen_buckets(model, units, self.comm.world_size, threshold)
        self.of_unit, self.units_of = {}, {bucket: [] for bucket in self.trained}
        place = {slot.parameter: bucket for bucket in (*self.trained, *self.frozen) for slot in bucket.slots}
        for unit, parameters in parameters_of_units(units).items():
            self.of_unit[unit] = list(dict.fromkeys(place[p] for p in parameters if p in place))
            for bucket in self.of_unit[unit]:
                self.units_of.setdefault(bucket, []).append(unit)

    def sharded(self, unit):
        """Return the buckets of a unit that are whole only while they are gathered."""
        return [bucket for bucket in self.of_unit[unit] if not is_persistent(bucket, self.threshold)]

    def materialize(self, stored, look_ahead, limit, in_fp32=False):
        """Give the parameters values, unit by unit, and cut them. `in_fp32`: shards of what is trained in 16 bits are
        its masters, and are rounded for each gather."""
        self.shards, self.whole, self.frozen_pieces, initializer = {}, {}, {}, self.initializer
        self.gathering = Gathering(self.comm, self.shards, self.whole, look_ahead, limit, stored)
        self.gathering.large_heads = large_heads(self.model, (*self.trained, *self.frozen))
        stored.register("parameters", self._stored_shards)
        modules = modules_of_units(list(self.of_unit))
        held = {p for bucket in (*self.trained, *self.frozen) for p in bucket.parameters}
        if initializer:
            initializer.make_whole([p for p in self.model.parameters() if p not in held])
        for unit, buckets in self.of_unit.items():
            for bucket in buckets:
                self._make_whole(bucket)
            if initializer:
                initializer.fill(modules[unit])
            for bucket in buckets:
                if self._cut(bucket):
                    stored.put(bucket, only="parameters")
        if initializer:
            initializer.finish()
        self._broadcast_rest()
        for bucket in self.trained if in_fp32 else ():
            if bucket.dtype in LOW and not is_persistent(bucket, self.threshold):
                # The master is the shard: no 16-bit copy of it rests beside it.
                self.shards[bucket] = mark(self.shards[bucket].float(), "optimizer state")

    def _stored_shards(self, bucket):
        return [] if is_persistent(bucket, self.threshold) else [self.shards[bucket]]

    def _broadcast_rest(self):
        broadcast_rest(self.model, self.levels.comm, (*self.trained, *self.frozen))

    def _make_whole(self, bucket):
        """Put all parameters of a bucket side by side; again, if an earlier unit has some of them, too."""
        read = self.initializer and not self.initializer.reads_shards_of(bucket)
        if bucket not in self.whole:
            whole = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            for slot, view in zip(bucket.slots, bucket.views(mark(whole, "parameters")), strict=True):
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view
            self.whole[bucket] = whole
            if read:
                self.initializer.read_whole(bucket)
        elif read and not is_persistent(bucket, self.threshold):
            self.gathering.fetch(bucket)

    def _cut(self, bucket):
        """Keep this rank's shard of a bucket, as rank 0 has the whole or as a file has it, and release the whole.
        Return False if an earlier unit has done so."""
        whole, rank, stays = self.whole[bucket], self.comm.rank, is_persistent(bucket, self.threshold)
        if not whole.untyped_storage().nbytes() and whole.numel():
            return False
        if bucket not in self.shards:
            self.shards[bucket] = mark(torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=bucket.device),
                                       "parameters")
        if self.initializer and self.initializer.reads_shards_of(bucket):
            self.initializer.read(bucket.pieces(rank), self.shards[bucket])
            if stays:
                self.comm.all_gather(self.shards[bucket], out=whole, label=bucket.name)
        else:
            self.levels.comm.broadcast(whole, 0, out=whole, label=bucket.name)
            self.shards[bucket].copy_(bucket.shard(whole, rank))
        if not stays:
            self.gathering.hide(bucket)
        if bucket in self.frozen:
            self.frozen_pieces[bucket] = [(piece, self.shards[bucket][piece.place : piece.place + piece.end
                                                                      - piece.first]) for piece in bucket.pieces(rank)]
        return True

    def stay(self):
        """Return {bucket: its whole parameters} of those that are whole between steps."""
        return {bucket: whole for bucket, whole in self.whole.items() if is_persistent(bucket, self.threshold)}

    def updated(self, bucket):
        """Launch the all_gather of a bucket that stays whole; others are gathered when a unit computes."""
        if not is_persistent(bucket, self.threshold):
            return None
        return self.comm.all_gather(self.shards[bucket], out=self.whole[bucket], async_op=True, label=bucket.name)

    @torch.no_grad()
    def spread(self, stored):
        """Broadcast rank 0's parameters and buffers, all of which are whole, and cut them."""
        for bucket, whole in self.whole.items():
            self.levels.comm.broadcast(whole, 0, out=whole, label=bucket.name)
            with stored.loaded(bucket, only="parameters"):
                self.shards[bucket].copy_(bucket.shard(whole, self.comm.rank))
        self._broadcast_rest()
