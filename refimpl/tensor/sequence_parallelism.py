"""Megatron's sequence parallelism: between the split layers, each rank keeps its part of the tokens.

    tokens:   embedding · · · | norm          norm        | norm     · · · head
    (B, T)                    |    \\ attention /   \\ MLP /  |
    rows:                     own  all own       all own    all

Tensor parallelism repeats norms, dropout and the residual stream on all ranks. Here each rank has 1/N of the tokens
there (`rows`: (1, B·T/N, C)). Attention and MLP read all of them: where tensor parallelism has an all_reduce, there is
an all_gather before and a reduce_scatter after, together as many bytes. Autograd keeps rows alone: what backward needs
of a gathered x is gathered again, beside the gradient of x. "Reducing Activation Recomputation in Large Transformer
Models" (Korthikanti et al. 2022), section 4.2.2.
"""

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from ..others import ask_of_others
from .conjugate import own_rows, whole_sequence
from .linear import ColumnParallelLinear, RowParallelLinear
from .random_streams import OwnRandom
from .split_plan import region_of
from .tensor import proven_sums, split_as, sum_gradients

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


def sequence_parallel(model: torch.nn.Module, comm: "Communicator", plan: Any = None, *, region: Any = None,
                      loss_parallel: bool = False) -> torch.nn.Module:
    """Split `model` as `tensor_parallel` does, and the tokens between its split layers; returns it.

    - `region`: names of the list of blocks, and of the norm after it. The blocks take x (B, T, C) first, and return it.

    Tokens need not be a multiple of the ranks: the last rank pads its rows. Each weight of the region that is whole on
    every rank, a norm's say, has its gradient summed over the ranks. Hidden states that a model returns beside its
    output (`output_hidden_states`) are rows, (1, n, C). ValueError as `tensor_parallel`, for a model whose region is
    not known, and for one with adapters of peft.
    """
    if any(ask_of_others("adapted", module) is not None for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has adapters of peft, which read all tokens, and a rank has some of "
                         "them: use tensor_parallel")
    blocks, norm = region_of(model) if region is None else region
    tokens = _SplitTokens(blocks, norm)
    summed = proven_sums(model, comm, plan, loss_parallel, tokens)
    return tokens(split_as(model, comm, plan, loss_parallel, summed), comm)


class _SplitTokens(NamedTuple):
    """Splits the tokens of a model whose layers are split. By its two names it equals another one, for `prove`."""

    blocks: str
    norm: str

    def __call__(self, model, comm):
        return split_tokens(model, comm, model.get_submodule(self.blocks), model.get_submodule(self.norm))


def split_tokens(model, comm, blocks, norm, begins=True, ends=True):
    """Split the tokens between the layers of a model, or a stage of one, that `tensor_parallel` has split; returns it.

    `blocks`: the list of its blocks. `norm`: after which module ranks have all tokens again; of a stage without a last
    norm it is the last block. `begins`, `ends`: whether the model's first block is here, its last one. Between stages
    rows alone are sent: a stage gets (rows, a tensor (B, T, 0) that says of how many tokens), and returns the same.
    """
    here = RowsRegion(comm, ends)
    if not begins:
        model.register_forward_pre_hook(here.arrive, prepend=True)  # before ranks compare what they are given
    blocks[0].register_forward_pre_hook(here.enter, with_kwargs=True)
    norm.register_forward_hook(here.leave)
    model.register_forward_hook(here.end, always_call=True)  # no rank is left on its own stream
    split = set()
    for block in blocks:
        block.register_forward_pre_hook(here.remember, with_kwargs=True)
        for first in block.children():
            first.register_forward_pre_hook(here.recall)
        for parent in _readers(block):
            name = next(iter(inspect.signature(parent.forward).parameters))
            parent.register_forward_pre_hook(functools.partial(here.gather, name), with_kwargs=True)
        for layer in block.modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                # The bias of a layer by rows is whole on each rank, which adds it to its own rows alone.
                split |= {*layer.parameters()} - {getattr(layer, "bias", None)}
            if isinstance(layer, RowParallelLinear):
                layer.sequence = True
    # A module of the region sees this rank's rows alone: its gradient is one part of the sum.
    sum_gradients([p for module in (*blocks, norm) for p in module.parameters() if p not in split], comm)
    return model


def _readers(block):
    """Return the modules of a block that read all tokens: those that call layers by columns, and of layers that the
    block calls itself, as OPT's, each one."""
    columns = {module: [child for child in module.children() if isinstance(child, ColumnParallelLinear)]
               for module in block.modules()}
    return [*columns.pop(block), *(module for module, found in columns.items() if found)]


class RowsRegion:
    """Holds hooks for the blocks in which each rank has rows of tokens. `tokens`: (B, T) of the current forward.
    `arrived`: the rows of the stage before, until the first block takes them."""

    def __init__(self, comm, ends=True):
        self.comm, self.ends, self.tokens, self.arrived, self.random = comm, ends, None, None, OwnRandom(comm)
        self.forwards = {}  # storage of a block's input → (weak reference to it, tokens of the forward it is from)

    @torch._disable_dynamo
    def arrive(self, module, args):
        """Take the rows that another stage sent. The model gets a shape of all tokens, for masks and positions."""
        self.arrived, said, *targets = args
        return self.arrived.new_zeros(()).expand(*said.shape[:-1], self.arrived.shape[-1]), *targets

    @torch._disable_dynamo
    def enter(self, module, args, kwargs):
        """Begin the region: cut the first block's input to this rank's rows."""
        x, replaced = _first(module, args, kwargs)
        self.tokens = x.shape[:-1]
        # A freed input's address may be another's soon.
        self.forwards = {key: (held, tokens) for key, (held, tokens) in self.forwards.items() if not held.expired()}
        if module.training:
            self.random.common = None  # a stream that a recomputation has left
            self.random.begin()
        arrived, self.arrived = self.arrived, None
        return replaced(_TokensToRows.apply(x, self.comm) if arrived is None else arrived)

    @torch._disable_dynamo
    def remember(self, module, args, kwargs):
        """Note of which forward a block's input is: it may be recomputed after another forward has begun."""
        rows, _ = _first(module, args, kwargs)  # what recomputes the block keeps this very storage
        if torch._C._current_graph_task_id() == -1:  # no backward is under way
            storage = rows.untyped_storage()
            self.forwards[storage._cdata] = StorageWeakRef(storage), self.tokens
        self.recall(module, (rows,))

    @torch._disable_dynamo
    def recall(self, module, args):
        """Go back to the forward that a block's input is from. What recomputes a block keeps its input."""
        if args and torch.is_tensor(args[0]):
            _, self.tokens = self.forwards.get(args[0].untyped_storage()._cdata, (None, self.tokens))

    @torch._disable_dynamo
    def gather(self, name, module, args, kwargs):
        """Give a module all tokens. Split layers find in `sequence_rows` what autograd keeps instead."""
        rows, replaced = _first(module, args, kwargs, name)
        x = _RowsToTokens.apply(rows, self.comm, self.tokens)
        x.sequence_rows = rows, self.tokens
        return replaced(x)

    @torch._disable_dynamo
    def leave(self, module, args, output):
        """End the region: gather all tokens after the last norm, if no other stage follows."""
        self.random.end()
        return _RowsToTokens.apply(output, self.comm, self.tokens) if self.ends else output

    @torch._disable_dynamo
    def end(self, module, args, output):
        """Leave this rank's own stream of random numbers, also after a forward that raised."""
        self.random.end()
        self.arrived = None
        return output if self.ends or output is None else (output, output.new_empty(*self.tokens, 0))


def _first(module, args, kwargs, name=None):
    """Return the first argument of a module, and a function that returns (args, kwargs) with another."""
    if args:
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    name = name or next(iter(inspect.signature(module.forward).parameters))
    return kwargs[name], lambda x: (args, {**kwargs, name: x})


class _TokensToRows(torch.autograd.Function):
    """All tokens, which every rank has, to this rank's rows; backward gathers."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.tokens = comm, x.shape[:-1]
        return own_rows(x, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return whole_sequence(dx, ctx.comm, ctx.tokens), None


class _RowsToTokens(torch.autograd.Function):
    """Rows of all ranks to all tokens, whose gradient is the same on every rank; backward takes this rank's rows."""

    @staticmethod
    def forward(ctx, x, comm, tokens):
        ctx.comm = comm
        return whole_sequence(x, comm, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return own_rows(dx, ctx.comm), None, None  # no sum: all ranks compute the same from all tokens
