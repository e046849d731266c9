"""Context parallelism: each rank has all weights and 1/N of the tokens of a sequence, and attention sees all of them.

    attention = SequenceParallelAttention(comm, "ring")           # how: ring, ulysses or gathered
    context_parallel(model, attention)                            # from outside; our GPT, and models of transformers
    loss = accumulate(engine, attention.shard(tokens, pad=0), attention.shard(targets, pad=-100))

Everything but attention treats each token alone. So a rank computes its tokens as one device would, with positions in
the whole sequence, and autograd keeps 1/N. Gradients of weights are sums over tokens: an engine averages them over
dp × cp ranks, and `accumulate` weighs each rank's loss by its targets.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import CollectiveMismatch
from ..model import GPT, Attention, softmax_attention
from ..others import ask
from .blockwise_pair import dense_pair
from .dense import dense_attention
from .gathered import gathered_attention
from .inner_attention import check_dropout
from .ring import ring_attention
from .sequence_proof import prove_context
from .token_order import check_order, in_order, positions, shard
from .ulysses import ulysses_attention

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention, "gathered": gathered_attention}


class SequenceParallelAttention:
    """Attention of a sequence cut over the N ranks of `comm`: `attention(q, k, v, causal=True)`, (B, H, T/N, D).

    - `comm`: the context-parallel group: `mesh.get_parallel_group("cp")`.
    - `method`: "ring", "ulysses" or "gathered"; see these files.
    - `order`: "plain" or "zig-zag"; see `token_order`. By default zig-zag, in which causal attention is as much work on
      each rank; for Ulysses plain, which has no other.
    - `attention`: what computes it. For a ring an `AttentionPair`; else any function (q, k, v) -> out, which gets
      `window`, `softcap` and `sinks`. By default it is dense; in a model, for Ulysses and gathered, it is the model's
      own; with a window, a softcap or sinks it is `dense_attention`, which has the matrix in memory.

    ValueError for an unknown method or order, and for Ulysses in zig-zag order.
    """

    def __init__(self, comm: "Communicator", method: str = "ring", *, order: str | None = None,
                 attention: Callable[..., torch.Tensor] | None = None) -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
        order = ("plain" if method == "ulysses" else "zig-zag") if order is None else order
        check_order(order)
        if method == "ulysses" and order != "plain":
            raise ValueError(f"order={order!r} with Ulysses: expected 'plain'; each rank has whole sequences of some "
                             "heads, as much work as the others'")
        self.comm, self.method, self.order, self.attention = comm, method, order, attention

    @torch._disable_dynamo
    def __call__(self, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, causal: bool = False,
                 dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
        """Return attention of this rank's tokens. Raises as the method does."""
        check_dropout(dropout_p)
        default = dense_attention if options else softmax_attention
        attention = self.attention or (dense_pair if self.method == "ring" else default)
        if self.method != "ulysses":
            options["order"] = self.order
        return METHODS[self.method](q_BHTD, k_BGTD, v_BGTD, self.comm, causal=causal, attention=attention, **options)

    def within(self, attention: Callable[..., torch.Tensor]) -> "SequenceParallelAttention":
        """Return this, with `attention` in it unless one was given or the method is a ring."""
        if self.attention is not None or self.method == "ring":
            return self
        other = copy.copy(self)
        other.attention = attention
        return other

    def shard(self, x: torch.Tensor, *, dim: int = 1, pad: Any = None) -> torch.Tensor:
        """Return this rank's tokens of x, of which `dim` is the whole sequence. `pad`: fills it up to a multiple of N
        (zig-zag: 2N); for targets −100. ValueError if it would have to be filled up and `pad` is None."""
        return shard(x, self.comm.rank, self.comm.world_size, self.order, dim, pad)

    def gather(self, x: torch.Tensor, *, dim: int = 1) -> torch.Tensor:
        """Return the whole sequence of which x is this rank's part: the inverse of `shard`, without autograd."""
        # An all_gather joins ranks along dim 0.
        every = self.comm.all_gather(x.detach().movedim(dim, 0).contiguous(), label="a sequence")
        return in_order(every, self.comm.world_size, self.order, 0).movedim(0, dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the positions in the whole sequence of this rank's `length` tokens: (length,) int64."""
        return positions(self.comm.rank, self.comm.world_size, length, self.order, device)

    @torch._disable_dynamo
    def check_length(self, tokens: torch.Tensor) -> None:
        """Raise CollectiveMismatch, naming them, if ranks have another number of rows or tokens (B, T) than rank 0."""
        shape = torch.tensor([tokens.shape[:2]], dtype=torch.int64)
        gathered = self.comm.host().all_gather(shape, label="rows and tokens")  # no rank waits for its GPU
        if isinstance(gathered, FakeTensor):
            return
        shapes = [tuple(each) for each in gathered.tolist()]
        if differ := self.comm.differing(shapes):
            raise CollectiveMismatch(f"ranks {differ} have other numbers of rows or tokens than rank "
                                     f"{self.comm.ranks[0]}: (rows, tokens) on each rank: "
                                     f"{dict(zip(self.comm.ranks, shapes, strict=True))}. Cut one batch on all ranks: "
                                     "attention.shard(tokens), which can pad it", differ)


def context_parallel(model: torch.nn.Module, attention: SequenceParallelAttention) -> torch.nn.Module:
    """Give `model` this SequenceParallelAttention, in place; returns it. It is then called with a rank's tokens.

    Each call gets positions in the whole sequence, and no others, and checks that all ranks have as many tokens. For
    our GPT, and for models of transformers whose attention comes from their registry (AttentionInterface) and which
    take position_ids: these score a rank's tokens with `shift_labels`, since a rank does not have the token after its
    last. What would be wrong in silence is refused: a cache, a mask, layers in which tokens meet outside attention.

    Applies before or after `tensor_parallel`, and before an engine. Dropout outside attention draws from each rank's
    own generator: seed ranks differently, or they drop the same places of other tokens. ValueError for another model:
    give its attention `attention(q, k, v, causal=True)` and its positions `attention.positions(length)` by hand.
    """
    if not isinstance(attention, SequenceParallelAttention):
        raise TypeError(f"attention={attention!r}: expected a SequenceParallelAttention(comm), which also cuts the "
                        "tokens of each batch: attention.shard(tokens)")
    if getattr(model, "_sequence_is_split", False):
        raise ValueError(f"{type(model).__name__} has its sequence split already: expected a model that attends to the "
                         "tokens it is given")
    if isinstance(model, GPT):
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_attention(attention.within(module.attention))
        model.register_forward_pre_hook(_Positions(attention, model.config.context_length), with_kwargs=True)
    elif (give := ask("sequence", model)) is not None:
        prove_context(model, attention, give)
        give(model, attention)
    else:
        raise ValueError(f"how {type(model).__name__} computes attention is not known: call attention(q, k, v, "
                         "causal=True) in its attention, and use attention.positions(length) for its positions")
    model._sequence_is_split = True  # what `accumulate` asks: each micro-batch needs all ranks, with targets or not
    return model


class _Positions:
    """Gives a GPT the positions of a rank's tokens, as a hook before its forward."""

    def __init__(self, attention, context):
        self.attention, self.context = attention, context

    def __call__(self, model, args, kwargs):
        tokens = args[0] if args else kwargs.get("tokens_BT")
        if not isinstance(tokens, torch.Tensor):
            return args, kwargs  # the model says what it expects
        if kwargs.get("offset") or kwargs.get("positions_BT") is not None:
            raise ValueError("offset or positions_BT of a part of a sequence: expected none; they are "
                             "attention.positions(…)")
        self.attention.check_length(tokens)
        T, N = tokens.shape[1], self.attention.comm.world_size
        if N * T > self.context:
            raise ValueError(f"{T} tokens on each of {N} ranks are a sequence of {N * T}: the context has "
                             f"{self.context}")
        return args, {**kwargs, "positions_BT": self.attention.positions(T, tokens.device)[None]}
