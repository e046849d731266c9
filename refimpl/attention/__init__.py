"""Attention, from the definition to one that never holds the T × S matrix."""

from .block import FlashTransformerBlock, flash_block_terms
from .flash import flash_attention, flash_attention_bytes
from .memory_efficient import memory_efficient_attention, memory_efficient_attention_bytes
from .reference import AttentionBytes, AttentionFlops, attention_flops, reference_attention, reference_attention_bytes
from .tiled import tiled_attention, tiled_attention_bytes
from .traffic import flash_attention_traffic

__all__ = [
    "AttentionBytes", "AttentionFlops", "FlashTransformerBlock", "attention_flops", "flash_attention",
    "flash_attention_bytes", "flash_attention_traffic", "flash_block_terms", "memory_efficient_attention",
    "memory_efficient_attention_bytes", "reference_attention", "reference_attention_bytes", "tiled_attention",
    "tiled_attention_bytes",
]
