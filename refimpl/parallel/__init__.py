"""Splitting the model: each rank has a part of every layer's weights, and computes a part of every layer.

Order of reading: `paper` (the idea in one screen), `conjugate` (what goes between ranks), `linear` (layers by columns,
by rows), `vocabulary` (embedding and loss), `plan` and `tensor` (a model, from outside), `sequence` (and its tokens),
`partitioned` (and the inputs of recomputed regions).
"""

from .linear import ColumnParallelLinear, RowParallelLinear
from .partitioned import PartitionedInputs
from .sequence import sequence_parallel
from .tensor import tensor_parallel
from .vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy

__all__ = ["ColumnParallelLinear", "PartitionedInputs", "RowParallelLinear", "VocabularyParallelEmbedding",
           "sequence_parallel", "tensor_parallel", "vocabulary_parallel_cross_entropy"]
