"""ZeRO in one screen: data parallelism, and the three stages that keep in shards what it repeats on every rank.

Each of N ranks has a part of the batch; the gradient is the mean of theirs, g = (1/N) Σ_r g_r. In data parallelism each
holds all Ψ parameters, gradients and both moments of Adam, and computes the whole update; in ZeRO each computes 1/N:

    stage   in shards           bytes on a rank, Adam, fp32    a step sends, times (N−1)/N
      0     nothing             4Ψ + 4Ψ + 8Ψ                   2Ψ: all_reduce of gradients
      1     optimizer state     4Ψ + 4Ψ + 8Ψ/N                 2Ψ: reduce_scatter of gradients, all_gather of parameters
      2     and gradients       4Ψ + 4Ψ/N + 8Ψ/N               2Ψ: the same, the first unit by unit while backward runs
      3     and parameters      4Ψ/N + 4Ψ/N + 8Ψ/N             3Ψ: all_gather in forward and in backward, reduce_scatter

"ZeRO" (Rajbhandari et al. 2020), sections 5 and 7. At stage 3 a unit, such as one layer, is whole while it computes.
"""

import torch
from torch import nn


class Unit:
    """Keep the parameters of one module side by side, in a flat tensor `whole` that is cut into N equal shards."""

    def __init__(self, module, comm, stage):
        self.parameters, self.comm, self.stage = list(module.parameters()), comm, stage
        sizes = [p.numel() for p in self.parameters]
        self.padding = self.parameters[0].new_zeros(-sum(sizes) % comm.world_size)
        self.whole = self.flat([p.detach() for p in self.parameters])  # (N·n,)
        for p, view in zip(self.parameters, self.whole.split([*sizes, len(self.padding)]), strict=False):
            p.data = view.view(p.shape)  # a window on whole: what frees or fills whole, frees or fills p
            if stage >= 2:
                p.register_post_accumulate_grad_hook(self.arrived)
        shard = self.whole.chunk(comm.world_size)[comm.rank]  # (n,), a view: to step it steps whole; stage 3 copies it
        self.updated = nn.Parameter(self.whole if stage == 0 else shard if stage < 3 else shard.clone())
        if stage == 3:
            self.release()
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.computed)

    def flat(self, tensors):
        """Return the tensors side by side, padded to a multiple of N elements."""
        return torch.cat([*(x.flatten() for x in tensors), self.padding])

    @torch.no_grad()
    def gather(self, *_):
        """Make the parameters whole, from every rank's shard."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.comm.all_gather(self.updated.detach(), out=self.whole)

    def release(self):
        """Free the whole parameters, with what autograd saved of them: it is a view of this storage."""
        self.whole.untyped_storage().resize_(0)

    def computed(self, module, args, output):
        """Release the parameters after forward, and gather them when backward comes back to the module's output."""
        self.release()
        if output.requires_grad:
            output.register_hook(self.gather)  # its gradient is there: this module's backward is next

    def arrived(self, parameter):
        """Reduce the gradients of this unit as soon as backward has computed the last of them."""
        if all(p.grad is not None for p in self.parameters):
            self.reduce()
            if self.stage == 3:
                self.release()

    def reduce(self):
        """Average the gradients over the ranks. Keep those of the elements that this rank updates, free the rest."""
        g = self.flat([p.grad for p in self.parameters])  # (N·n,)
        for p in self.parameters:
            p.grad = None
        g = self.comm.reduce_scatter(g) if self.stage else self.comm.all_reduce(g)  # (n,), or (N·n,) at stage 0
        self.updated.grad = g / self.comm.world_size


class Zero:
    """Train by `loss.backward()` and `step()`, in turn. `units`: modules of a model that all ranks build alike. They
    have each parameter once in all, and return one tensor each. `comm`: of refimpl.comm, or the ring of `collectives`.
    `optimizer`: makes one from a list of parameters. Adam treats each element by itself, so flat shards will do."""

    def __init__(self, units, comm, optimizer, stage):
        self.stage, self.units = stage, [Unit(module, comm, stage) for module in units]
        self.optimizer = optimizer([unit.updated for unit in self.units])  # each moment has the size of `updated`

    def step(self):
        """Update the parameters. At stages 1 and 2 each rank then gets those that the others have updated."""
        for unit in self.units if self.stage < 2 else ():
            unit.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units if self.stage in (1, 2) else ():
            unit.gather()
