"""The three ways to split one model over ranks, by one name: `tensor` (each layer), `context` (the sequence) and
`pipeline` (runs of layers). Each is a package of its own.
"""

from .context import (
    AttentionPair,
    SequenceParallelAttention,
    context_parallel,
    dense_pair,
    gathered_attention,
    ring_attention,
    ulysses_attention,
)
from .pipeline import PipelineParallelStage, pipeline
from .proof import CannotShrink, CutDiffers
from .tensor import (
    ColumnParallelLinear,
    PartitionedInputs,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    sequence_parallel,
    tensor_parallel,
    vocabulary_parallel_cross_entropy,
)

__all__ = ["AttentionPair", "CannotShrink", "ColumnParallelLinear", "CutDiffers", "PartitionedInputs",
           "PipelineParallelStage", "RowParallelLinear", "SequenceParallelAttention", "VocabularyParallelEmbedding",
           "context_parallel", "dense_pair", "gathered_attention", "pipeline", "ring_attention", "sequence_parallel",
           "tensor_parallel", "ulysses_attention", "vocabulary_parallel_cross_entropy"]
