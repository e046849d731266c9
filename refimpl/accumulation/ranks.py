"""Gradient accumulation on several ranks: gradients are reduced once a step, after the last micro-batch.

There are three cases, with the same methods: one process alone; ranks connected by a Communicator; and a model that
averages its gradients itself in every backward outside `no_sync()`, as torch's DistributedDataParallel does.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import Communicator, ring_traffic
from .sums import gradient_dtype, is_narrower


def ranks_of(model, parameters, comm):
    """Choose the case for `model` and `comm`.

    Raises TypeError if `comm` is not a Communicator, and ValueError for a model of FSDP2.
    """
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
    """Make a Communicator of the process group of torch's own wrappers; None if the model has none."""
    group = getattr(model, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return None
    return Communicator(dist.get_rank(group), dist.get_world_size(group), parameters[0].device, group)


class Alone:
    """The case of one process, which has the whole batch. The other cases override what differs."""

    comm = None
    factor = 1  # each loss is multiplied by it: W where the model averages gradients over W ranks, to make it a sum

    def __init__(self, parameters):
        self.parameters = parameters

    def sum_in(self, dtype, parts):
        """Return the dtype to sum in; None for a single micro-batch, which leaves nothing to sum."""
        return dtype if len(parts) > 1 else None

    def backward(self, last):
        """Return a context for forward and backward of a micro-batch. Only in the `last` are gradients reduced."""
        return nullcontext()

    def join(self, forward):
        """Take part in the reduction without a backward, on a rank without targets."""

    def reduce_gradients(self, sums):
        """Replace this rank's gradients by their sum over all ranks. One process alone has nothing to reduce."""

    def total(self, terms):
        """Sum the number `terms` over all ranks. These 8 bytes are sent before the first backward, which needs them."""
        if self.comm is None:
            return terms
        total = self.comm.all_reduce(torch.tensor(terms, dtype=torch.float64, device=self.comm.device))
        return terms * self.comm.world_size if isinstance(total, FakeTensor) else total.item()

    def loss(self, loss):
        """Return the sum over all ranks of `loss`, this rank's share."""
        if self.comm is None:
            return loss
        return self.comm.all_reduce(torch.as_tensor(loss, dtype=torch.float64, device=self.comm.device)).float()


class Connected(Alone):
    """The case of ranks that `comm` connects. The model is an ordinary one, and its gradients are summed here."""

    def __init__(self, parameters, comm):
        super().__init__(parameters)
        self.comm = comm
        if any(parameter.grad is not None for parameter in parameters):
            raise ValueError("some .grad is not None, and would be summed over ranks a second time: call "
                             "optimizer.zero_grad() first, and give the batch of a step in one call")

    def sum_in(self, dtype, parts):
        """Return the same dtype on all ranks, however many parts each has, since they reduce the sums."""
        return dtype

    def reduce_gradients(self, sums):
        """Reduce one parameter after another, in place. One that has no gradient on any rank stays without."""
        here = [sums.so_far(parameter) is not None for parameter in self.parameters]
        anywhere = self.comm.all_reduce(torch.tensor(here, dtype=torch.uint8, device=self.comm.device), "max")
        wanted = here if isinstance(anywhere, FakeTensor) else anywhere.tolist()
        for parameter, is_wanted in zip(self.parameters, wanted, strict=True):
            if is_wanted:
                gradient = sums.so_far(parameter)
                gradient = sums.begin(parameter) if gradient is None else gradient
                self.comm.all_reduce(gradient, out=gradient)


class InModel(Alone):
    """The case of a model that averages gradients over W ranks itself. Each loss is multiplied by W, for the sum."""

    def __init__(self, model, parameters, comm):
        super().__init__(parameters)
        self.model, self.comm = model, comm
        self.factor = 1 if comm is None else comm.world_size

    def sum_in(self, dtype, parts):
        """Return None: autograd sums in `.grad`, since that is what the model reduces in the last backward.

        Raises ValueError if `dtype` would need sums elsewhere.
        """
        low = [p for p in self.parameters if dtype is not None and is_narrower(p, dtype)]
        if low and len(parts) > 1:
            raise ValueError(f"{type(self.model).__name__} reduces gradients itself, in {gradient_dtype(low[0])}: they "
                             f"cannot be summed in {dtype}. Give the module inside it and comm=, or dtype=None to sum "
                             "in .grad")
        return None

    def backward(self, last):
        """Return the model's own `no_sync()` for all but the last micro-batch."""
        return nullcontext() if last else self.model.no_sync()

    def join(self, forward):
        """Run a backward with zero gradients, since the other ranks wait in theirs.

        Its loss is an empty sum of the parameters, since a mean over no targets is NaN.
        """
        forward()
        torch.autograd.backward([parameter.flatten()[:0].sum() for parameter in self.parameters])


def accumulation_traffic(parameters, world_size, rank=0, dtype=torch.float32):
    """Predict the bytes (int) that `rank` of N = `world_size` sends in one `accumulate(…, comm=comm)`.

        2(N−1)/N · (Σᵢ Ψᵢ · max(eᵢ, size of dtype)  +  8  +  8  +  number of parameters)

    The sum is over `parameters`, those with gradients, of eᵢ bytes an element (their `grad_dtype`). The other terms are
    the number of targets, the loss, and a byte per parameter that says whether it has a gradient. Sizes that N does not
    divide are rounded as in `comm.ring_traffic`. The number of micro-batches does not matter; reducing gradients in
    each of them would send the sum as many times.
    """
    parameters = list(parameters)
    sizes = [(p.numel(), max(gradient_dtype(p).itemsize, 0 if dtype is None else dtype.itemsize)) for p in parameters]
    sizes += [(1, 8), (1, 8), (len(parameters), 1)]
    return sum(ring_traffic("all_reduce", n * element, world_size, rank=rank, itemsize=element) for n, element in sizes)
