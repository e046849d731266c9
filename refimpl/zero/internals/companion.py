"""A companion of the optimizer: it finds out when one that treated each element by itself does so no longer.

The trial before the first step (`elementwise`) is of three steps. Some optimizers change their rule later: Shampoo that
begins at step 10, a trust ratio after a warmup. So the same optimizer steps along on toys, at each step of the engine
and before it: on whole tensors of a dozen elements, and on a part of each, in fp64 on the host. Both begin each step at
the same values, with the same gradients and the engine's hyper-parameters of that moment, and have to end alike.

Toys are the same on all ranks, and nothing is sent. So all ranks raise alike, before any parameter is written. What
begins late on large tensors alone is not seen. What cannot run on the host is not watched.
"""

import contextlib

import numpy as np
import torch

from ...side_effects import no_side_effects
from .elementwise import BOUND, difference, kinds_of_groups, name_of, raise_lr, uneven

SHAPES = {1: (7,), 2: (3, 4)}, (3, 2, 2)  # by dimensions, and of more: a part of each begins and ends within a row
ROUND = 5  # gradients that take turns
FOLLOWED = type(None), bool, int, float, str, tuple


class Companion:
    """The optimizer on toys: of each kind of param group one for each number of dimensions from 2 on that occurs there,
    or for vectors if it has nothing else."""

    def __init__(self, optimizer, groups, named):
        self.name, self.steps, self.names, shapes, places = name_of(optimizer), 0, [], [], []
        for number, options, dims in kinds_of_groups(groups, named):
            found = {dim: dims[dim] for dim in dims if dim > 1 or dim == 1 == max(dims)}
            places.append((number, options, range(len(shapes), len(shapes) + len(found))))
            shapes += [SHAPES[0].get(dim, (*SHAPES[1], *[1] * dim)[:dim]) for dim in found]
            self.names += found.values()
        generator = torch.Generator().manual_seed(0)
        with no_side_effects():
            drawn = [torch.cat([uneven(shape, generator).view(-1) for shape in shapes] or [torch.zeros(0)])
                     for _ in range(1 + ROUND)]
            sizes = [torch.Size(shape).numel() for shape in shapes]
            parts = [slice(size // 5, size // 5 + size // 2) for size in sizes]
            self.cut = [torch.cat([x[part] for x, part in zip(each.split(sizes), parts, strict=True)] or [each])
                        for each in (torch.arange(sum(sizes)), *drawn)]
            self.index, *cut = self.cut
            self.sides = None
            with contextlib.suppress(Exception):  # what cannot be made on the host is not watched
                self.sides = [_Side(optimizer, places, shapes, drawn), _Side(optimizer, places, [
                    (part.stop - part.start,) for part in parts], cut)] if shapes else None

    def step(self, groups):
        """Step along with an engine whose param groups are `groups`. RuntimeError if whole and part end differently."""
        self.steps += 1
        if self.sides is None:
            return
        with no_side_effects():
            try:
                for side in self.sides:
                    side.step(self.steps, groups)
            except Exception:  # it cannot run on the host
                self.sides = None
                return
            whole, part = self.sides
            values = whole.values[self.index]
            if torch.equal(values, part.values):
                return
            sizes = [p.numel() for p in part.parameters]
            for name, *each in zip(self.names, *(x.split(sizes) for x in (part.start, values, part.values)),
                                   strict=True):
                if not difference(*each) <= BOUND:
                    raise RuntimeError(
                        f"{self.name} updates an element by others of its tensor or of other tensors, at step "
                        f"{self.steps} and not before, on tensors such as {name}, and a rank has flat pieces. Nothing "
                        "of this step has been written: go on at stage 0 (DataParallel), or with one that treats each "
                        "element by itself, such as AdamW")

    def go_to(self, steps, groups):
        """Count on from so many steps, which were made before a saved state was loaded."""
        self.step(groups)  # now it has states
        self.steps = steps
        for side in self.sides or ():
            for state in side.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"] * 0 + steps  # a tensor stays a tensor, a number a number


class _Side:
    """Tensors side by side in one, `values`, and the optimizer on them. `start`: values and gradients, by turns."""

    def __init__(self, optimizer, places, shapes, drawn):
        self.start, *self.gradients = map(_kept, drawn)
        self.values, self.gradient = _kept(drawn[0]), _kept(drawn[0])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.parameters, self.views = ([x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]
                                       for flat in (self.values, self.gradient))
        self.parameters, self.numbers = list(map(torch.nn.Parameter, self.parameters)), [each[0] for each in places]
        self.optimizer = optimizer([{**options, "params": [self.parameters[i] for i in toys]}
                                    for _, options, toys in places])
        for group in self.optimizer.param_groups:
            group.update({key: value.cpu() for key, value in group.items() if isinstance(value, torch.Tensor)})
            self._settle(group)

    @staticmethod
    def _settle(group):
        raise_lr(group)
        if "capturable" in group:
            group["capturable"] = False  # a host captures nothing

    def step(self, number, groups):
        """Make a step from `start`, with the options of the engine's param groups."""
        self.values.copy_(self.start)
        self.gradient.copy_(self.gradients[number % ROUND])
        for parameter, gradient in zip(self.parameters, self.views, strict=True):
            parameter.grad = gradient
        for group, place in zip(self.optimizer.param_groups, self.numbers, strict=True):
            group.update({key: value for key, value in groups[place].items() if type(value) in FOLLOWED
                          or isinstance(value, torch.Tensor) and value.is_cpu and key in group})
            self._settle(group)
        self.optimizer.step()


def _kept(tensor):
    """Return a copy in memory that is not torch's, so that no reading of its allocators has it."""
    return torch.from_numpy(np.array(tensor.numpy()))
