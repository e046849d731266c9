"""An optimizer over the pieces that one rank's shards hold: what every stage of ZeRO updates.

A piece is a flat part of a parameter. To the optimizer each is a parameter of its own, in the param group of the
parameter that it is a piece of. Adam, AdamW, SGD and all that treat each element by itself give the same numbers on
pieces as on whole tensors; one that looks at a tensor's shape (Adafactor, Muon, LAMB) does not.
"""

import contextlib

import torch

from ..memory import mark

LOW = (torch.float16, torch.bfloat16)


class Pieces:
    """The pieces of all buckets on one rank, as parameters. `of[bucket]`: [(Piece, Parameter)]. `members`: the names of
    the whole parameters in each param group, those of which this rank has no piece, too.

    A 16-bit parameter's piece is an fp32 copy, its master, which is rounded into the bucket's shard after each step;
    an fp32 one's is a view of the shard itself.
    """

    def __init__(self, buckets, shards, rank, optimizer, groups, named):
        self.of, self.masters = {}, {}
        for bucket in buckets:
            shard = shards[bucket]
            if bucket.dtype in LOW:
                shard = self.masters[bucket] = mark(shard.float(), "optimizer state")
            self.of[bucket] = [(piece, _parameter(shard, piece, bucket)) for piece in bucket.pieces(rank)]
        self._by_parameter = {piece.slot.parameter: own for pairs in self.of.values() for piece, own in pairs}
        self.optimizer = optimizer(self._groups(groups, named))

    def _groups(self, groups, named):
        """The caller's groups, each parameter replaced by this rank's piece of it, if it has one."""
        given = [{"params": [p for _, p in named]}] if groups is None else groups(named)
        given, names = [{**group, "params": list(group["params"])} for group in given], {p: name for name, p in named}
        self.members = [[names[p] for p in group["params"]] for group in given]
        mine = [{**group, "params": [self._by_parameter[p] for p in group["params"] if p in self._by_parameter]}
                for group in given]
        if not any(group["params"] for group in mine):  # more ranks than parameters: an optimizer takes no empty list
            mine[0]["params"] = [torch.nn.Parameter(torch.zeros(0))]
        return mine

    def give(self, bucket, shard, used):
        """The pieces' gradients: views of a shard of gradients; None for parameters that nobody has used."""
        for piece, own in self.of[bucket]:
            part = shard[piece.place : piece.place + piece.end - piece.first]
            own.grad, own.grad_dtype = None, part.dtype
            own.grad = part if piece.slot.parameter in used else None

    def step(self, bucket, shards):
        """Update one bucket's pieces, and with them `shards[bucket]`; all others keep their gradients, if any.

        A bucket at a time: what an optimizer allocates on its way, and fp32 copies of 16-bit gradients, are then
        those of one bucket.
        """
        for _, own in self.of[bucket]:
            if own.grad is not None and own.grad.dtype != own.dtype:
                gradient, own.grad = own.grad.to(own.dtype), None
                own.grad_dtype, own.grad = own.dtype, gradient
        with self._only(bucket):
            self.optimizer.step()
        self.round(bucket, shards)
        for _, own in self.of[bucket]:
            own.grad = None

    @contextlib.contextmanager
    def _only(self, bucket):
        """The optimizer has this bucket's pieces alone. It looks at all that it has, and for each bucket again: of
        GPT-3's 1,152 pieces in some 800 buckets that would be most of a step."""
        groups, mine = self.optimizer.param_groups, {id(own) for _, own in self.of[bucket]}
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [own for own in group["params"] if id(own) in mine]
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def states(self, bucket):
        """The bucket's master, if it has one, and what the optimizer keeps of its elements."""
        held = [kept for _, own in self.of[bucket] for kept in self.optimizer.state.get(own, {}).values()]
        return [*([self.masters[bucket]] if bucket in self.masters else []),
                *(kept for kept in held if isinstance(kept, torch.Tensor) and kept.dim())]

    def round(self, bucket, shards):
        """The bucket's shard from its masters, if it has any."""
        if bucket in self.masters:
            shards[bucket].copy_(self.masters[bucket])


def _parameter(shard, piece, bucket):
    own = torch.nn.Parameter(shard[piece.place : piece.place + piece.end - piece.first])
    if own.dtype != bucket.dtype:
        own.grad_dtype = bucket.dtype
    return own
