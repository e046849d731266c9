"""Attention, from the definition to one that never holds the T × S matrix."""

from .reference import AttentionBytes, AttentionFlops, attention_flops, reference_attention, reference_attention_bytes
from .tiled import tiled_attention, tiled_attention_bytes

__all__ = ["AttentionBytes", "AttentionFlops", "attention_flops", "reference_attention", "reference_attention_bytes",
           "tiled_attention", "tiled_attention_bytes"]
