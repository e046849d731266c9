"""Splitting the sequence, for one that is longer than a device: each rank has all weights, and a part of the tokens.

Order of reading: `papers/ring_attention` (the idea in one screen), `token_order` (who has which tokens),
`blockwise_pair` and `ring`, `gathered`, `ulysses` (three ways to attend to all of them), `neighbours` (a window over a
ring), `context` (a model, from outside), `closed_forms` (bytes, traffic).
"""

from ..common.attention_pair import AttentionPair
from .blockwise_pair import dense_pair
from .context import SequenceParallelAttention, context_parallel
from .gathered import gathered_attention
from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = ["AttentionPair", "SequenceParallelAttention", "context_parallel", "dense_pair", "gathered_attention",
           "ring_attention", "ulysses_attention"]
