"""Which other ranks have a part of the batch, and when gradients are reduced: once a step, after the last micro-batch.

Three cases with the same methods: one process; ranks that a Communicator connects; a model that averages its gradients
in every backward but those under its `no_sync()`, as torch's DistributedDataParallel does.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import Communicator, ring_traffic
from .sums import gradient_dtype, is_narrower


def ranks_of(model, parameters, comm):
    """Choose the case of `model` and `comm`. TypeError if `comm` is no Communicator, ValueError for FSDP2's models."""
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm={comm!r}: expected a Communicator, such as comm.launch gives each rank, or None for one "
                        "process alone")
    if hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(f"{type(model).__name__} was made by fully_shard, which keeps unreduced gradients where "
                         "accumulate cannot clear them after an exception. Write the loop by hand: cut the batch with "
                         "split, into as many micro-batches on every rank; call model.set_requires_gradient_sync("
                         "False) before every backward but the last, and (True) before the last; multiply each loss "
                         "by the number of ranks and by count_targets of the micro-batch, and divide it by the targets "
                         "of all ranks")
    if hasattr(model, "no_sync"):
        return InModel(model, parameters, comm or _communicator_of(model, parameters))
    return Alone(parameters) if comm is None else Connected(parameters, comm)


def _communicator_of(model, parameters):
    """A Communicator of the process group that torch's own wrappers carry; None if the model has none."""
    group = getattr(model, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return None
    return Communicator(dist.get_rank(group), dist.get_world_size(group), parameters[0].device, group)


class Alone:
    """One process has the whole batch."""

    comm = None
    factor = 1  # of each loss: W where the model averages over W ranks what is to be a sum

    def __init__(self, parameters):
        self.parameters = parameters

    def sum_in(self, dtype, parts):
        """Return the type to sum in: None where there are no two gradients to be summed."""
        return dtype if len(parts) > 1 else None

    def backward(self, last):
        """Return a context for a micro-batch, forward and backward. In the `last` one gradients may be reduced."""
        return nullcontext()

    def join(self, forward):
        """Take part in the reduction without a backward: this rank has no target in any micro-batch."""

    def reduce_gradients(self, sums):
        """Replace this rank's gradients by their sum over all ranks."""

    def total(self, terms):
        """Sum `terms`, a number, over all ranks: 8 bytes, sent before the first backward, which needs the sum."""
        if self.comm is None:
            return terms
        total = self.comm.all_reduce(torch.tensor(terms, dtype=torch.float64, device=self.comm.device))
        return terms * self.comm.world_size if isinstance(total, FakeTensor) else total.item()

    def loss(self, loss):
        """Sum this rank's share of the loss over all ranks."""
        if self.comm is None:
            return loss
        return self.comm.all_reduce(torch.as_tensor(loss, dtype=torch.float64, device=self.comm.device)).float()


class Connected(Alone):
    """`comm` connects the ranks. Each has the model as it is, and gradients are summed here."""

    def __init__(self, parameters, comm):
        super().__init__(parameters)
        self.comm = comm
        if any(parameter.grad is not None for parameter in parameters):
            raise ValueError("gradients are there already, and would be summed over ranks a second time: call "
                             "optimizer.zero_grad() first, and give the batch of a step in one call")

    def sum_in(self, dtype, parts):
        """Return the same type on all ranks, however many parts each has: they reduce the sums."""
        return dtype

    def reduce_gradients(self, sums):
        """Reduce one parameter after the other, in place. A parameter without a gradient on any rank gets none."""
        here = [sums.so_far(parameter) is not None for parameter in self.parameters]
        anywhere = self.comm.all_reduce(torch.tensor(here, dtype=torch.uint8, device=self.comm.device), "max")
        wanted = here if isinstance(anywhere, FakeTensor) else anywhere.tolist()
        for parameter, is_wanted in zip(self.parameters, wanted, strict=True):
            if is_wanted:
                gradient = sums.so_far(parameter)
                gradient = sums.begin(parameter) if gradient is None else gradient
                self.comm.all_reduce(gradient, out=gradient)


class InModel(Alone):
    """The model reduces gradients itself, to their mean over W ranks. So each loss is multiplied by W, for the sum."""

    def __init__(self, model, parameters, comm):
        super().__init__(parameters)
        self.model, self.comm = model, comm
        self.factor = 1 if comm is None else comm.world_size

    def sum_in(self, dtype, parts):
        """Sum in `.grad` only: the model reduces what is in `.grad` in the last backward, and would miss other sums."""
        low = [p for p in self.parameters if dtype is not None and is_narrower(p, dtype)]
        if low and len(parts) > 1:
            raise ValueError(f"{type(self.model).__name__} reduces gradients itself, in {gradient_dtype(low[0])}: they "
                             f"cannot be summed in {dtype} beside it. Give the module inside it and comm=, or "
                             "dtype=None to sum in .grad")
        return None

    def backward(self, last):
        """Return the model's own `no_sync()` for all but the last micro-batch."""
        return nullcontext() if last else self.model.no_sync()

    def join(self, forward):
        """Run a backward of zeros, since the others wait in theirs. (The mean over no targets would be NaN.)"""
        forward()
        torch.autograd.backward([parameter.flatten()[:0].sum() for parameter in self.parameters])


def accumulation_traffic(parameters, world_size, rank=0, dtype=torch.float32):
    """Predict the bytes (int) that `rank` of N = `world_size` sends in one `accumulate(…, comm=comm)`, of any number
    of micro-batches.

        Σ over parameters of 2(N−1)/N · Ψᵢ · max(eᵢ, size of dtype)
        + the same of 8 (number of targets), 8 (loss) and one byte for each parameter (whether it has a gradient)

    `parameters`: those with gradients, of eᵢ bytes an element (their `grad_dtype`); chunks that N does not divide are
    counted as `comm.ring_traffic` does. A reduction in every micro-batch sends the first line once for each of them.
    """
    parameters = list(parameters)
    sizes = [(p.numel(), max(gradient_dtype(p).itemsize, 0 if dtype is None else dtype.itemsize)) for p in parameters]
    sizes += [(1, 8), (1, 8), (len(parameters), 1)]
    return sum(ring_traffic("all_reduce", n * element, world_size, rank=rank, itemsize=element) for n, element in sizes)
