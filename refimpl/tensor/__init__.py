"""Splitting the model: each rank has a part of every layer's weights, and computes a part of every layer.

Order of reading: `papers/tensor_parallel` (the idea in one screen), `conjugate` (what goes between ranks), `linear`
(layers by columns, by rows), `vocabulary` (logits and loss), `embedding`, `split_plan` and `tensor` (a model, from
outside), `experts`, `random_streams` (dropout), `same_batch` (what its ranks compare before a forward),
`sequence_parallelism` (and its tokens), `partitioned` (and the inputs of recomputed regions), `closed_forms` (bytes,
traffic). That what is cut computes what the whole does: `refimpl/equivalence`.
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from ..equivalence import CannotShrink, CutDiffers
    from .embedding import VocabularyParallelEmbedding
    from .linear import ColumnParallelLinear, RowParallelLinear
    from .partitioned import PartitionedInputs
    from .sequence_parallelism import sequence_parallel
    from .tensor import tensor_parallel
    from .vocabulary import vocabulary_parallel_cross_entropy

__getattr__, __dir__ = lazily(__name__, {
    "..equivalence": "CannotShrink CutDiffers", ".embedding": "VocabularyParallelEmbedding",
    ".linear": "ColumnParallelLinear RowParallelLinear", ".partitioned": "PartitionedInputs",
    ".sequence_parallelism": "sequence_parallel", ".tensor": "tensor_parallel",
    ".vocabulary": "vocabulary_parallel_cross_entropy"})
__all__ = ["CannotShrink", "ColumnParallelLinear", "CutDiffers", "PartitionedInputs", "RowParallelLinear",
           "VocabularyParallelEmbedding", "sequence_parallel", "tensor_parallel", "vocabulary_parallel_cross_entropy"]
