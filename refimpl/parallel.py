"""The three ways to split one model over ranks, by one name: `tensor` (each layer), `context` (the sequence) and
`pipeline` (runs of layers). Each is a package of its own.
"""

from .common.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {
    "refimpl.context": "AttentionPair SequenceParallelAttention context_parallel dense_pair gathered_attention "
                       "ring_attention ulysses_attention",
    "refimpl.pipeline": "PipelineParallelStage pipeline", "refimpl.equivalence": "CannotShrink CutDiffers",
    "refimpl.tensor": "ColumnParallelLinear PartitionedInputs RowParallelLinear VocabularyParallelEmbedding "
                      "sequence_parallel tensor_parallel vocabulary_parallel_cross_entropy"})
# ruff: noqa: F822
__all__ = ["AttentionPair", "CannotShrink", "ColumnParallelLinear", "CutDiffers", "PartitionedInputs",
           "PipelineParallelStage", "RowParallelLinear", "SequenceParallelAttention", "VocabularyParallelEmbedding",
           "context_parallel", "dense_pair", "gathered_attention", "pipeline", "ring_attention", "sequence_parallel",
           "tensor_parallel", "ulysses_attention", "vocabulary_parallel_cross_entropy"]
