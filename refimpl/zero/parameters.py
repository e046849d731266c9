"""Parameters that every rank has whole (stages 0 to 2), side by side in buckets."""

import torch


class WholeParameters:
    """Moves each bucket's parameters to one buffer, `whole[bucket]`, with the values of rank 0. `shards[bucket]` is
    this rank's part of it: the ranks of `comm`, which are `levels.shards`, cut it."""

    def __init__(self, model, levels, buckets):
        self.model, self.levels, self.comm, self.whole, self.shards = model, levels, levels.shards, {}, {}
        for bucket in buckets:
            whole = self.whole[bucket] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            for slot, view in zip(bucket.slots, bucket.views(whole), strict=True):
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view  # the same Parameter: hooks, ties and the user's names stay
            self.shards[bucket] = bucket.shard(whole, self.comm.rank)
        self.spread()  # else ranks that were seeded differently would train N models

    def stay(self):
        """Return {bucket: its whole parameters} of those that are whole between steps: all."""
        return self.whole

    def updated(self, bucket):
        """Launch the all_gather of every rank's updated shard of a bucket; return its Handle."""
        return self.comm.all_gather(self.shards[bucket], out=self.whole[bucket], async_op=True, label=bucket.name)

    @torch.no_grad()
    def spread(self, stored=None):
        """Broadcast rank 0's parameters and buffers."""
        for bucket, whole in self.whole.items():
            self.levels.comm.broadcast(whole, 0, out=whole, label=bucket.name)
        broadcast_rest(self.model, self.levels.comm, self.whole)


def broadcast_rest(model, comm, buckets):
    """Broadcast rank 0's buffers, and its parameters that are in none of `buckets`."""
    held = {slot.parameter for bucket in buckets for slot in bucket.slots}
    for tensor in (*model.buffers(), *(p for p in model.parameters() if p not in held)):
        comm.broadcast(tensor.detach(), 0, out=tensor.detach())
