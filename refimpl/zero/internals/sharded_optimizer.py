"""The caller's optimizer, run on the pieces of parameters that one rank's shards hold: what stages 1 to 3 update.

A piece is a flat part of a parameter. The optimizer sees each piece as a parameter of its own, in the param group of
the parameter that it belongs to. Adam, AdamW, SGD and all that treat each element by itself give the same numbers on
pieces as on whole tensors; one that looks at a tensor's shape (Adafactor, Muon, LAMB) does not, and `elementwise` finds
it out.
"""

import contextlib

import torch

from ...memory import mark

LOW = (torch.float16, torch.bfloat16)


class ShardedOptimizer:
    """An optimizer of one rank's pieces of all buckets.

    - `pieces[bucket]`: [(Piece, Parameter)], the Parameter being what the optimizer updates.
    - `masters[bucket]`: the fp32 copy of a 16-bit bucket's shard. Its pieces are views of that copy, which is rounded
      into the shard after each step. The pieces of an fp32 bucket are views of the shard itself.
    - `group_names`: the names of the whole parameters in each param group, also of those that this rank has no part of.
    """

    def __init__(self, buckets, shards, rank, optimizer, groups, named):
        self.pieces, self.masters = {}, {}
        for bucket in buckets:
            shard = shards[bucket]
            if bucket.dtype in LOW:
                shard = self.masters[bucket] = mark(shard.float(), "optimizer state")
            self.pieces[bucket] = [(piece, _parameter(shard, piece, bucket)) for piece in bucket.pieces(rank)]
        self._by_parameter = {piece.slot.parameter: own for pairs in self.pieces.values() for piece, own in pairs}
        self.optimizer = optimizer(self._groups(groups, named))

    def _groups(self, groups, named):
        """Return the caller's groups, each parameter replaced by this rank's piece of it, if it has one."""
        given = [{"params": [p for _, p in named]}] if groups is None else groups(named)
        given, names = [{**group, "params": list(group["params"])} for group in given], {p: name for name, p in named}
        self.group_names = [[names[p] for p in group["params"]] for group in given]
        mine = [{**group, "params": [self._by_parameter[p] for p in group["params"] if p in self._by_parameter]}
                for group in given]
        if not any(group["params"] for group in mine):  # this rank has no piece, but an optimizer needs a parameter
            mine[0]["params"] = [torch.nn.Parameter(torch.zeros(0))]
        return mine

    def set_gradients(self, bucket, shard, used):
        """Set the pieces' gradients to views of a shard of gradients; to None for parameters that are not `used`."""
        for piece, own in self.pieces[bucket]:
            part = shard[piece.place : piece.place + piece.end - piece.first]
            own.grad, own.grad_dtype = None, part.dtype
            own.grad = part if piece.slot.parameter in used else None

    def step(self, bucket, shards):
        """Update one bucket's pieces, and with them `shards[bucket]`; all others keep their gradients, if any.

        A bucket at a time: temporary tensors of the optimizer, and fp32 copies of 16-bit gradients, are then those of
        one bucket. Each bucket begins with the options that the first one found, so that an optimizer that counts
        steps in its param groups counts one.
        """
        if bucket is next(iter(self.pieces)):
            self._options = [_options(group) for group in self.optimizer.param_groups]
        else:
            for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
                params = group["params"]
                group.clear()
                group.update(options, params=params)
        for _, own in self.pieces[bucket]:
            if own.grad is not None and own.grad.dtype != own.dtype:
                gradient, own.grad = own.grad.to(own.dtype), None
                own.grad_dtype, own.grad = own.dtype, gradient
        with self._only(bucket):
            self.optimizer.step()
        self.round_masters(bucket, shards)
        for _, own in self.pieces[bucket]:
            own.grad = None

    @contextlib.contextmanager
    def _only(self, bucket):
        """Restrict the param groups to this bucket's pieces inside the context.

        An optimizer iterates over all its parameters in each step. For GPT-3's 1,152 pieces in some 800 buckets, that
        would take most of the time.
        """
        groups, mine = self.optimizer.param_groups, {id(own) for _, own in self.pieces[bucket]}
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [own for own in group["params"] if id(own) in mine]
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def state_tensors(self, bucket):
        """Return the bucket's master, if it has one, and the tensors that the optimizer keeps of its elements."""
        kept = [value for _, own in self.pieces[bucket] for value in self.optimizer.state.get(own, {}).values()]
        return [*([self.masters[bucket]] if bucket in self.masters else []),
                *(value for value in kept if isinstance(value, torch.Tensor) and value.dim())]

    def set_masters(self, bucket, shards):
        """Write the bucket's 16-bit shard to its fp32 master. No-op for a bucket without a master."""
        if bucket in self.masters:
            self.masters[bucket].copy_(shards[bucket])

    def round_masters(self, bucket, shards):
        """Round the bucket's fp32 master into its 16-bit shard. No-op for a bucket without a master."""
        if bucket in self.masters:
            shards[bucket].copy_(self.masters[bucket])


def _options(group):
    return {key: value for key, value in group.items() if key != "params"}


def _parameter(shard, piece, bucket):
    own = torch.nn.Parameter(shard[piece.place : piece.place + piece.end - piece.first])
    if own.dtype != bucket.dtype:
        own.grad_dtype = bucket.dtype
    return own
