"""Splitting the model: each rank has a part of every layer's weights, and computes a part of every layer; and splitting
the sequence, for one that is longer than a device: each rank has all weights, and a part of the tokens; and the layers:
each rank has some of them, whole.

Order of reading: `papers/tensor_parallel` (the idea in one screen), `conjugate` (what goes between ranks), `linear`
(layers by columns, by rows), `vocabulary` (logits and loss), `embedding`, `plan` and `tensor` (a model, from outside),
`same_batch` (what its ranks compare before a forward), `sequence` (and its tokens), `partitioned` (and the inputs of
recomputed regions). Of long sequences: `papers/ring_attention` (the idea in one screen), `order` (who has which
tokens), `pair` and `ring`, `gathered`, `ulysses` (three ways to attend to all of them), `context` (a model, from
outside), `context_forms` (bytes, traffic). Of consecutive layers on each rank: `papers/pipeline` (the idea in one
screen), and the package `pipeline`. That what is cut computes what the whole does: the package `proof`, on a toy of the
model's class.
"""

from .context import SequenceParallelAttention, context_parallel
from .embedding import VocabularyParallelEmbedding
from .gathered import gathered_attention
from .linear import ColumnParallelLinear, RowParallelLinear
from .pair import AttentionPair, dense_pair
from .partitioned import PartitionedInputs
from .pipeline import PipelineParallelStage, pipeline
from .proof import CannotShrink, CutDiffers
from .ring import ring_attention
from .sequence import sequence_parallel
from .tensor import tensor_parallel
from .ulysses import ulysses_attention
from .vocabulary import vocabulary_parallel_cross_entropy

__all__ = ["AttentionPair", "CannotShrink", "ColumnParallelLinear", "CutDiffers", "PartitionedInputs",
           "PipelineParallelStage", "RowParallelLinear", "SequenceParallelAttention", "VocabularyParallelEmbedding",
           "context_parallel", "dense_pair", "gathered_attention", "pipeline", "ring_attention", "sequence_parallel",
           "tensor_parallel", "ulysses_attention", "vocabulary_parallel_cross_entropy"]
