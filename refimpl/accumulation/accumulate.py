"""Gradient accumulation: a large batch is processed as several small ones, and the gradient is that of the whole.

Activations grow with the number of rows in a batch. Gradients do not, since a gradient is a sum over rows. So the batch
can be cut into micro-batches, each with its own forward and backward. The optimizer then steps once, on the sum.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..common.ledger import Ledger
from .gradient_reduction import Engine, ranks_of
from .gradient_sums import GradientSums
from .micro_batches import count_targets, cut, weights

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


def accumulate(model: Any, *batch: Any, micro_batch: int | None = None, micro_batches: int | None = None,
               loss_fn: Callable[..., torch.Tensor] | None = None, reduction: str = "mean",
               count: Callable[..., Any] = count_targets, dtype: torch.dtype = torch.float32,
               scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
               comm: "Communicator | None" = None) -> torch.Tensor:
    """Add the gradient of `loss_fn(model, *batch)`, computed in parts, to `.grad`. Returns the loss without a graph.

        loss = accumulate(model, tokens, targets, micro_batch=8)     # instead of loss = model(tokens, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)      #        and loss.backward()
        optimizer.step()

    The gradient is that of the whole batch. So clip it once, after this call, and keep the learning rate. Only one
    micro-batch's activations are in memory at a time (`accumulation_bytes`).

    - `model`: a module, or an engine of refimpl.zero, which holds the gradients and averages them over its own ranks:
      `loss = accumulate(engine, tokens, targets, micro_batch=8)`, then `engine.clip_grad_norm_(1.0)` and
      `engine.step()`. Ranks may have different numbers of rows, targets and micro-batches. All ranks run as many
      micro-batches: one with fewer runs its last one again, and gets no gradient from it (`engine_traffic`). If its
      ranks have parts of one sequence (context parallelism), they also run those in which they have no target.
    - `batch`: tensors, or lists and dicts of them, with the rows in their first dimension. `micro_batch`: the number of
      rows in a micro-batch; the last one may have fewer. Alternatively, `micro_batches` gives the micro-batches
      themselves (each padded to its own length, for example): an iterable of tuples of arguments, or of single
      arguments.
    - `loss_fn(model, *micro_batch)`: returns a tensor of one number with its graph. By default `model(*micro_batch)`.
    - `reduction`: whether that number is the `"mean"` or the `"sum"` over the micro-batch. A mean is weighted by its
      number of terms, `count(*micro_batch)`. By default these are the targets in the last tensor that are not −100
      (`count_targets`). A micro-batch without terms is not run. Models of transformers shift labels by themselves, so
      a row's first label is no target: give `count=lambda tokens, labels: count_targets(labels[:, 1:])`.
    - `dtype`: gradients with fewer bytes per element are summed in this dtype. fp32 takes 4 bytes a parameter. The sum
      is rounded once, at the end, to the gradient's own dtype. With None, autograd sums in `.grad`, in that dtype. To
      keep the sum in fp32, set `parameter.grad_dtype = torch.float32` beforehand.
    - `scale`: a function applied to each loss before its backward, such as a loss scaler's `scale`. The returned loss
      is not scaled.
    - `comm`: connects the ranks, each of which passes its own part of the batch. Loss and gradient are those of all
      ranks' rows together. Gradients are reduced once, after the last micro-batch (`accumulation_traffic`). A `model`
      with a method `no_sync`, such as torch's DDP, reduces them itself, in the last backward; `comm` is then made from
      its `process_group`. A model made by `fully_shard` (FSDP2) is refused. An engine has its own `comm`.

    Raises TypeError or ValueError for a batch that cannot be cut or has no target, for an invalid option, and for a
    model without trainable parameters; gradients then stay as they were. An exception in a loss, a backward or a
    collective is passed on. Every `.grad` is then set to None (`engine.zero_grad()` is called), since a partial sum is
    not a gradient, and no hook is left. The same holds for the RuntimeError that is raised if another hook takes
    gradients away during backward, as an optimizer that steps there does: it would step on one micro-batch's gradient.

    Modules that mix rows, above all BatchNorm in training, see a micro-batch instead of the batch, so their gradient
    differs. Dropout draws different masks than it would for the whole batch. Counting targets waits for a GPU once.
    """
    parameters = _trainable(model)
    _check_options(reduction, dtype, loss_fn=loss_fn, count=count, scale=scale)
    parts = cut(batch, micro_batch, micro_batches)
    ranks = ranks_of(model, parameters, comm)
    weighted = zip(parts, weights(parts, reduction, count, ranks.sum_terms), strict=True)
    work = [(part, weight) for part, weight in weighted if weight or ranks.sequence_is_split]
    work = ranks.padded_work(work, spare=parts[-1])
    sums = GradientSums(ranks.parameters, ranks.sum_dtype(dtype, work))
    loss_fn = loss_fn or _call
    try:
        loss = 0.0
        with sums:
            for number, (part, weight) in enumerate(work, 1):
                with ranks.micro_batch(number == len(work), weight):
                    # A tensor, so that no micro-batch waits for a number.
                    loss = loss + _backward(ranks, _one_number(loss_fn(model, *part)), weight, scale)
                sums.check_kept()
            if not work:
                ranks.join_reduction(lambda: loss_fn(model, *parts[-1]))
        loss = ranks.sum_loss(loss)
        ranks.reduce_gradients(sums)
        sums.write_gradients()
    except BaseException:
        ranks.drop_gradients()
        raise
    return loss


def _call(model, *part):
    return model.forward(*part) if isinstance(model, Engine) else model(*part)


def _backward(ranks, loss, weight, scale):
    """Run the backward of a micro-batch's loss. Returns its share of the loss, in fp32 or wider, without a graph."""
    loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0  # a mean over no targets is NaN
    scaled = loss * ranks.factor if ranks.factor != 1 else loss
    scaled = scaled if scale is None else scale(scaled)
    if not isinstance(scaled, torch.Tensor):
        raise TypeError(f"scale returned {type(scaled).__name__}: expected the loss that it was given, multiplied by a "
                        "factor")
    ranks.backward(scaled)
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))


def _one_number(loss):
    """Return `loss` without dimensions. Raises TypeError or ValueError unless it is one number with a graph."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is of type {type(loss).__name__}: expected a tensor; to take it from what a model "
                        "returns, loss_fn=lambda model, batch: model(batch).loss")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}: expected one number, a mean or a sum (reduction=)")
    if not loss.requires_grad:
        raise ValueError("the loss does not require a gradient: expected one that depends on a trainable parameter. "
                         "Was it computed under no_grad, detached, or by frozen modules alone?")
    return loss.reshape(())


def _trainable(model):
    """Return the parameters that get gradients, each once."""
    model = model.model if isinstance(model, Engine) else model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accumulate({type(model).__name__}, …): expected a module, whose gradients are summed, or an "
                        "engine of refimpl.zero. Pass a function as loss_fn=")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: call requires_grad_(True) "
                         "on those to train")
    return parameters


def _check_options(reduction, dtype, **functions):
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum', as loss_fn reduces a micro-batch")
    _check_dtype("dtype", dtype, or_none=True)
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name}={function!r}: expected a function")


def _check_dtype(name, dtype, or_none=False):
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point or or_none and dtype is None):
        raise ValueError(f"{name}={dtype!r}: expected a floating-point type, such as torch.float32"
                         + ", or None" * or_none)


def accumulation_bytes(parameters: int, activations: int, micro_batches: int, gradient: torch.dtype = torch.float32,
                       dtype: torch.dtype = torch.float32) -> Ledger:
    """Predict the bytes of gradients and activations at the start of the last backward, the peak of both: a Ledger.

    With Ψ = `parameters`, N = `micro_batches`, e = size of `gradient` (the dtype of `.grad`), s = size of `dtype` (in
    which gradients are summed; None: e) and A = `activations` of one micro-batch (`memory.activation_bytes`):

        gradients      Ψ · max(e, s)    if N > 1, else 0: no gradient exists before the first backward
        activations    A

    From N = 2 on, nothing grows with N; the whole batch at once would have N · A. If e < s, backward also holds the
    gradients that one operation returns (a weight's and its bias's, e bytes an element), and Ψ · e remain at the end.
    Raises ValueError for a count that is not an integer or is too small, and for a dtype that is not floating-point.
    """
    _check_dtype("gradient", gradient)
    _check_dtype("dtype", dtype, or_none=True)
    for name, number, least in (("parameters", parameters, 0), ("activations", activations, 0),
                                ("micro_batches", micro_batches, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r}: expected an integer of at least {least}")
    # A sum in fp32 is there in place of `.grad`, not beside it.
    element = max(gradient.itemsize, 0 if dtype is None else dtype.itemsize)
    return Ledger(gradients=parameters * element * (micro_batches > 1), activations=activations)
