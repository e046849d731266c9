"""What others than the optimizer write to parameters: modules in forward; a user, or a load, between steps.

What modules write to their own is kept if all ranks wrote the same; if not, an error names it. `nn.Embedding(
max_norm=1)` shortens rows of its weight, others renormalise theirs: under no_grad, in place. That counts a tensor's
version up. So versions are compared with those of before, when a unit is released and before each phase. A rank keeps
its part of what was written, in shards and masters, as training without shards would keep all; and a number of all bits
of it, which the next check of phases compares. (A write through `parameter.data` counts nothing up.)
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

PART, ODD = 2**20, 0x9E3779B97F4A7C15 - 2**64  # elements at a time; a factor whose multiples differ in most bits


class Writes:
    """Follows the parameters of an engine that are whole between its phases; those that are gathered tell it.

    `digests`: {name: a number of all bits} of what was written since the last check; 0 on a rank alone.
    """

    def __init__(self, alone, whole, shards, rank):
        self.alone, self.whole, self.shards, self.rank = alone, whole, shards, rank
        self.digests, self._undo, self._versions = {}, {}, {}
        self.see()

    def see(self):
        """Note the versions of whole parameters: what was written so far was the engine's, or is lost."""
        self._versions = {slot.parameter: slot.parameter._version for bucket in self.whole for slot in bucket.slots}

    def look(self):
        """Keep what was written to whole parameters."""
        for bucket, whole in self.whole.items():
            names = [slot.name for slot in bucket.slots if slot.parameter._version != self._versions[slot.parameter]]
            if names:
                self.write_to_shard(bucket, whole, names)
        self.see()

    @torch.no_grad()
    def write_to_shard(self, bucket, whole, names):
        """Take this rank's part of a bucket's whole parameters, of which `names` were written, into its shard."""
        if isinstance(whole, FakeTensor):
            return
        for slot in bucket.slots:
            if slot.name in names:
                self.digests[slot.name] = 0 if self.alone else digest(slot.view(whole))
        shard, part = self.shards[bucket], bucket.shard(whole, self.rank)
        if bucket not in self._undo:
            self._undo[bucket] = None if shard.data_ptr() == part.data_ptr() else shard.clone()
        if self._undo[bucket] is not None:  # else the shard is a part of the whole, and has been written
            follow(shard, part)

    def settle(self, stored, update, agree):
        """Call `agree(digests)`. If it raises, shards are again as they were; else masters follow them."""
        digests, undo, self.digests, self._undo = self.digests, self._undo, {}, {}
        try:
            agree(digests)
        except BaseException:
            for bucket, before in undo.items():
                if before is not None:
                    with stored.loaded(bucket, only="parameters"), torch.no_grad():
                        self.shards[bucket].copy_(before)
            raise
        for bucket in undo:
            if bucket in update.masters:
                with update.loaded(bucket):
                    update.follow(bucket)


def digest(x):
    """Return a number of all bits of a tensor, of an order of its own: Σ bᵢ · (odd · i) mod 2⁶⁴."""
    bits = x.detach().reshape(-1).view(torch.uint8 if x.itemsize == 1 else getattr(torch, f"int{8 * x.itemsize}"))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, bits.numel(), PART):
        part = bits[first : first + PART].long()
        total += (part * (torch.arange(first, first + len(part), device=x.device) * ODD + 1)).sum()
    return total.item()


@torch.no_grad()
def follow(master, shard):
    """Let an fp32 master be what was written to its shard, where that differs from what it is rounded to."""
    shard = shard.to(master.device)
    master.copy_(torch.where(shard == master.to(shard.dtype), master, shard.to(master.dtype)))


@contextlib.contextmanager
def gathered(engine: Any, write: bool = False) -> Iterator[None]:
    """Gather all parameters, to be read. What is written to them is lost, unless `write`: then rank 0's values are
    those of all ranks when the context ends, of masters too. All ranks call it; at stages 0 to 2 parameters are
    whole anyway."""
    yield
    engine.writes.see()
    if write:
        engine.parameters.spread(engine._stored)
        for bucket, master in engine.update.masters.items():
            with engine.update.loaded(bucket), torch.no_grad():
                master.copy_(engine.parameters.shards[bucket])


@torch.no_grad()
def publish(engine):
    """Bring the parameters up to date after a load has written to masters, or to this rank's shards."""
    if engine.stage == 3:
        engine.gathering.see(engine.parameters.whole)  # a module's writes from before the load are not to be kept
        engine.gathering.end_step()  # what a forward without a backward has left whole
    for bucket in engine.buckets if engine.stage else ():
        with engine.update.loaded(bucket):
            engine.update.round_master(bucket)
        handle = engine.parameters.updated(bucket)
        if handle is not None:
            handle.wait()
    engine.writes.see()
