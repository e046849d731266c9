"""The embedding split over the ranks of a tensor-parallel group by its vocabulary.

"Megatron-LM" (Shoeybi et al. 2019), section 3. Of V tokens' embeddings of C features, (V, C), rank r of n holds rows
r·V//n … (r+1)·V//n − 1. Rows that are elsewhere give zero; an all_reduce of (N, C), for N tokens, adds the ranks'
results. The bytes that it sends are in `vocabulary.vocabulary_traffic`.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from ..sharding import ShardSpec, set_spec
from .internals.ids import check_ids, local_rows, refuse_second_derivatives
from .vocabulary import part

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


class VocabularyParallelEmbedding(nn.Module):
    """Maps tokens (…) to their embeddings (…, C), the same on all ranks; each rank holds a part of the V rows.

        embedding = VocabularyParallelEmbedding.of(model.embedding, comm, "embedding.weight")

    - `weight` (v, C): the rows `part(V, comm)`. A head of the same rows may share the Parameter.
    - `padding_idx`: a row that gets no gradient, as in `nn.Embedding`.

    All ranks pass the same tokens. That is not checked here, as it would take another message;
    `vocabulary_parallel_cross_entropy` checks the targets. Forward is an all_reduce, in place; backward communicates
    nothing. Autograd keeps the caller's tokens alone. Raises ValueError if `weight` is not this rank's part, IndexError
    on a CPU for a token outside 0 … V − 1; on a GPU an assertion fails.
    """

    def __init__(self, weight: torch.Tensor, comm: "Communicator", V: int, *, padding_idx: int | None = None) -> None:
        super().__init__()
        self.first, self.end = part(V, comm)
        if len(weight) != self.end - self.first:
            raise ValueError(f"weight has {len(weight)} rows: expected {self.end - self.first}, rows {self.first} … "
                             f"{self.end - 1} of {V}, on {comm.place}")
        self.weight, self.comm, self.V, self.padding_idx = weight, comm, V, padding_idx

    @classmethod
    def of(cls, embedding: nn.Embedding, comm: "Communicator", name: str = "weight") -> "VocabularyParallelEmbedding":
        """Return this rank's part of an `nn.Embedding`, which stays as it is. `name`: of its weight in the whole model.

        A subclass that computes by `super().forward(tokens)`, as Gemma's scaled embedding, keeps its forward.
        ValueError for `max_norm`, `scale_grad_by_freq` and `sparse`; TypeError for other classes.
        """
        (first, end), whole = cls.cut(embedding, comm, name), embedding.weight
        weight = nn.Parameter(whole.detach()[first:end].clone(), requires_grad=whole.requires_grad)
        # Of any rank, so that a bucket keeps the same room on all.
        largest = -(-len(whole) // comm.world_size) * whole.shape[1]
        set_spec(weight, ShardSpec(name, tuple(whole.shape), (first, 0), tuple(weight.shape)), (name,), largest)
        made = cls(weight, comm, embedding.num_embeddings, padding_idx=embedding.padding_idx)
        if type(embedding).forward is nn.Embedding.forward:
            return made
        made.__dict__ |= {key: value for key, value in vars(embedding).items() if key not in vars(made)}
        made._buffers.update(embedding._buffers)  # a subclass's forward reads them, as Gemma's its scale
        made._modules.update(embedding._modules)
        # Still an instance of the subclass, but its super().forward finds ours before nn.Embedding's.
        made.__class__ = type(type(embedding).__name__, (_ChecksLookup, type(embedding), _LooksUpOwnRows), {})
        return made

    @staticmethod
    def cut(embedding: nn.Embedding, comm: "Communicator", name: str = "weight") -> tuple[int, int]:
        """Return (first, end) of this rank's rows. Raises what `of` raises."""
        if not isinstance(embedding, nn.Embedding) or [*embedding._parameters] != ["weight"]:
            raise TypeError(f"{name} is of {type(embedding).__name__}: expected an nn.Embedding, or a subclass that "
                            "computes by it and has no other parameter; leave it out of the plan to keep it whole")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option) not in (None, False):
                raise ValueError(f"{name} has {option}={getattr(embedding, option)}, which needs all rows at once or a "
                                 "sparse gradient: make the embedding without it")
        return part(embedding.num_embeddings, comm, name)

    @torch._disable_dynamo
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens (…): (…, C)."""
        check_ids(tokens, self.V, "tokens")
        return _Lookup.apply(self.weight, tokens, self)

    def extra_repr(self) -> str:
        """Say which rows are here."""
        return f"rows {self.first} … {self.end - 1} of {self.V}, {self.weight.shape[1]}"


class _LooksUpOwnRows(VocabularyParallelEmbedding, nn.Embedding):
    """Stands between a subclass of nn.Embedding and nn.Embedding: its `super().forward` looks up this rank's rows."""

    def forward(self, tokens):
        self.looked_up = True
        return super().forward(tokens)


class _ChecksLookup:
    """Stands before such a subclass. TypeError if its forward has not looked up rows by `super().forward`."""

    def forward(self, tokens):
        self.looked_up = False
        output = super().forward(tokens)
        if not self.looked_up:
            raise TypeError(f"{type(self).__name__} does not look up rows by super().forward(tokens), and has some of "
                            "them alone: leave it out of the plan to keep it whole")
        return output


class _Lookup(torch.autograd.Function):
    """Looks up the rows that are here, and adds them up over ranks. Saves the tokens for backward."""

    @staticmethod
    def forward(ctx, weight, tokens, module):
        ctx.save_for_backward(tokens)
        ctx.module = module
        local, elsewhere = local_rows(tokens, module.first, module.end)
        # Without the mask a row would be added once by each rank that does not have it.
        out = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return module.comm.all_reduce(out, out=out, label="embedding")

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivatives("VocabularyParallelEmbedding")
        (tokens,), module = ctx.saved_tensors, ctx.module
        local, skipped = local_rows(tokens, module.first, module.end)
        if module.padding_idx is not None:
            skipped |= tokens == module.padding_idx
        local.masked_fill_(skipped, -1)  # no row: given as the padding row, whose gradients torch leaves out
        rows = module.end - module.first
        return torch.ops.aten.embedding_dense_backward(gradient, local, rows, -1, False), None, None
