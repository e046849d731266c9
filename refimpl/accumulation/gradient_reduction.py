"""Gradient accumulation on several ranks: gradients are reduced once a step, after the last micro-batch.

There are four cases, with the same methods: one process alone; ranks connected by a Communicator; a model that
averages its gradients itself in every backward outside `no_sync()`, as torch's DistributedDataParallel does; and an
engine, which does so too and has a `backward` of its own.
"""

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import Communicator, ring_traffic
from .gradient_sums import gradient_dtype, is_narrower

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@runtime_checkable
class Engine(Protocol):
    """Stands for what `accumulate` takes in place of a model: it trains `model` on the ranks of `comm`, as engines of
    ZeRO do.

    Its gradients are averages over all ranks. It keeps them where it likes, whole or in shards, so that `accumulate`
    looks at no `.grad`. All ranks call `forward` and `backward` together, and each as often as the others.
    """

    model: torch.nn.Module
    comm: Communicator

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of `loss`, average them over all ranks, and add them to those that are there."""

    def no_sync(self) -> "AbstractContextManager[Any]":
        """Return a context in which `backward` need not average: a later backward outside of it does."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


def ranks_of(model, parameters, comm):
    """Choose the case for `model` and `comm`.

    Raises TypeError if `comm` is not a Communicator, and ValueError for a model of FSDP2 and for an engine with
    another `comm` than its own.
    """
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm={comm!r}: expected a Communicator, such as comm.launch gives each rank, or None for one "
                        "process alone")
    ranks = _case(model, parameters, comm)
    ranks.sequence_is_split = any(getattr(each, "_sequence_is_split", False) for each in (
        model, getattr(model, "model", None), getattr(model, "module", None)))
    return ranks


def _case(model, parameters, comm):
    if isinstance(model, Engine):
        if comm not in (None, model.comm):
            raise ValueError(f"comm={comm!r}, and the engine is on {model.comm!r}: leave comm out, since it reduces "
                             "gradients over its own ranks")
        return AveragedByEngine(model, parameters)
    if hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(f"{type(model).__name__} was made by fully_shard, which keeps unreduced gradients where "
                         "accumulate cannot clear them after an exception. Write the loop by hand: cut the batch with "
                         "split, into as many micro-batches on every rank; call model.set_requires_gradient_sync("
                         "False) before every backward but the last, and (True) before the last; multiply each loss "
                         "by the number of ranks and by count_targets of the micro-batch, and divide it by the targets "
                         "of all ranks")
    if hasattr(model, "no_sync"):
        return AveragedByModel(model, parameters, comm or _communicator_of(model, parameters))
    return OneProcess(parameters) if comm is None else SummedByComm(parameters, comm)


def _communicator_of(model, parameters):
    """Make a Communicator of the process group of torch's own wrappers; None if the model has none."""
    group = getattr(model, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return None
    return Communicator(dist.get_rank(group), dist.get_world_size(group), parameters[0].device, group)


class OneProcess:
    """Handles one process, which has the whole batch. The other cases override what differs."""

    comm = None
    sequence_is_split = False  # whether ranks have parts of one sequence, so that each micro-batch needs all of them
    factor = 1  # each loss is multiplied by it: W where the model averages gradients over W ranks, to make it a sum

    def __init__(self, parameters):
        self.parameters = parameters

    def sum_dtype(self, dtype, parts):
        """Return the dtype to sum in; None for a single micro-batch, which leaves nothing to sum."""
        return dtype if len(parts) > 1 else None

    def padded_work(self, work, spare):
        """Return the (micro-batch, weight) to run: `work`. An engine may ask for more, as `spare`."""
        return work

    def micro_batch(self, last, weight):
        """Return a context for forward and backward of a micro-batch. Only in the `last` are gradients reduced."""
        return nullcontext()

    def backward(self, loss):
        """Run the backward of `loss`."""
        loss.backward()

    def join_reduction(self, forward):
        """Take part in the reduction without a backward, on a rank without targets."""

    def drop_gradients(self):
        """Drop the gradients, which an exception has left incomplete."""
        for parameter in self.parameters:
            parameter.grad = None

    def reduce_gradients(self, sums):
        """Replace this rank's gradients by their sum over all ranks. One process alone has nothing to reduce."""

    def sum_terms(self, terms):
        """Sum the number `terms` over all ranks. These 8 bytes are sent before the first backward, which needs them."""
        if self.comm is None:
            return terms
        # A count may be a fraction; integers are exact to 2⁵³.
        total = self.comm.all_reduce(torch.tensor(terms, dtype=torch.float64, device=self.comm.device))
        return terms * self.comm.world_size if isinstance(total, FakeTensor) else total.item()

    def sum_loss(self, loss):
        """Return the sum over all ranks of `loss`, this rank's share."""
        if self.comm is None:
            return loss
        dtype = torch.promote_types(torch.as_tensor(loss).dtype, torch.float32)
        return self.comm.all_reduce(torch.as_tensor(loss, dtype=torch.float64, device=self.comm.device)).to(dtype)


class SummedByComm(OneProcess):
    """Handles ranks that `comm` connects. The model is an ordinary one, and its gradients are summed here."""

    def __init__(self, parameters, comm):
        super().__init__(parameters)
        self.comm = comm
        if any(parameter.grad is not None for parameter in parameters):
            raise ValueError("some .grad is not None, and would be summed over ranks a second time: call "
                             "optimizer.zero_grad() first, and give the batch of a step in one call")

    def sum_dtype(self, dtype, parts):
        """Return the same dtype on all ranks, however many parts each has, since they reduce the sums."""
        return dtype

    def reduce_gradients(self, sums):
        """Reduce one parameter after another, in place. One that has no gradient on any rank stays without."""
        here = [sums.so_far(parameter) is not None for parameter in self.parameters]
        # All ranks reduce the same ones: else some would wait for ever.
        anywhere = self.comm.all_reduce(torch.tensor(here, dtype=torch.uint8, device=self.comm.device), "max")
        wanted = here if isinstance(anywhere, FakeTensor) else anywhere.tolist()
        for parameter, is_wanted in zip(self.parameters, wanted, strict=True):
            if is_wanted:
                gradient = sums.so_far(parameter)
                gradient = sums.start_from_zeros(parameter) if gradient is None else gradient
                self.comm.all_reduce(gradient, out=gradient)


class AveragedByModel(OneProcess):
    """Handles a model that averages gradients over W ranks itself. Each loss is multiplied by W, for the sum."""

    def __init__(self, model, parameters, comm):
        super().__init__(parameters)
        self.model, self.comm = model, comm
        self.factor = 1 if comm is None else comm.world_size

    def sum_dtype(self, dtype, parts):
        """Return None: autograd sums in `.grad`, since that is what the model reduces in the last backward.

        Raises ValueError if `dtype` would need sums elsewhere.
        """
        low = [p for p in self.parameters if dtype is not None and is_narrower(p, dtype)]
        if low and len(parts) > 1:
            raise ValueError(f"{type(self.model).__name__} reduces gradients itself, in {gradient_dtype(low[0])}: they "
                             f"cannot be summed in {dtype}. Give the module inside it and comm=, or dtype=None to sum "
                             "in .grad")
        return None

    def micro_batch(self, last, weight):
        """Return the model's own `no_sync()` for all but the last micro-batch."""
        return nullcontext() if last else self.model.no_sync()

    def join_reduction(self, forward):
        """Run a backward with zero gradients, since the other ranks wait in theirs.

        Its loss is an empty sum of the parameters, since a mean over no targets is NaN.
        """
        forward()  # DDP's reducer is made ready by a forward
        torch.autograd.backward([parameter.flatten()[:0].sum() for parameter in self.parameters])


class AveragedByEngine(OneProcess):
    """Handles an engine, which holds the gradients and averages them over W ranks: each loss is multiplied by W.

    Its ranks make equally many backwards. One with fewer micro-batches runs its last one again, with a weight of 0.
    """

    def __init__(self, engine, parameters):
        super().__init__([])  # none whose `.grad` is summed, reduced or dropped here
        self.engine, self.comm, self._trained = engine, engine.comm, parameters
        self.factor = engine.comm.world_size

    def padded_work(self, work, spare):
        """Return `work`, and as often as other ranks have more: its last micro-batch, or `spare`, with a weight of 0.

        These 8 bytes are sent before the first forward.
        """
        most = self.comm.all_reduce(torch.tensor(len(work), device=self.comm.device), "max")
        missing = 0 if isinstance(most, FakeTensor) else int(most) - len(work)  # all make as many backwards
        return work + [(work[-1][0] if work else spare, 0)] * missing

    def sum_dtype(self, dtype, parts):
        """Return None: the engine adds gradients up. Raises ValueError if `dtype` would need sums elsewhere."""
        low = [p for p in self._trained if dtype is not None and is_narrower(p, dtype)]
        if low and len(parts) > 1:
            raise ValueError(f"{type(self.engine).__name__} sums gradients itself, of parameters in {low[0].dtype}: "
                             f"they cannot be summed in {dtype}. Give dtype=None to sum them as the engine does")
        return None

    @contextmanager
    def micro_batch(self, last, weight):
        """Open the engine's `no_sync()` for all but the last micro-batch. With a weight of 0 all gradients are zeros.

        Zero times the loss would not do: a mean over no targets is 0/0, and so may be its gradients. (Where a sequence
        is split it has to do: weights also get gradients from the targets of other ranks.)
        """
        zeroed = [] if weight or self.sequence_is_split else self._trained
        hooks = [parameter.register_hook(_zeros) for parameter in zeroed]
        try:
            with nullcontext() if last else self.engine.no_sync():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, loss):
        """Run the engine's backward of `loss`."""
        self.engine.backward(loss)

    def drop_gradients(self):
        """Drop the engine's gradients."""
        self.engine.zero_grad()


def _zeros(gradient):
    """Return zeros for a gradient, in one element's bytes."""
    return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def accumulation_traffic(parameters: Any, world_size: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> int:
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


def engine_traffic(world_size: int, rank: int = 0, reduction: str = "mean") -> int:
    """Predict the bytes (int) that `rank` sends in one `accumulate(engine, …)` beside what the engine sends.

        2(N−1)/N · (8  +  8  +  8)        the number of targets, that of micro-batches, and the loss

    A `reduction` of "sum" sends no number of targets. The engine's own bytes are those of a step of m micro-batches, m
    being the most that a rank has (`refimpl.zero.closed_forms.step_traffic`). Of these, stages 0 and 1 reduce in the
    last alone, stages 2 and 3 in each.
    """
    return (3 - (reduction == "sum")) * ring_traffic("all_reduce", 8, world_size, rank=rank, itemsize=8)
