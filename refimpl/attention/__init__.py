"""Attention, from the definition to kernels that never hold the T × S matrix.

Order of reading: `papers/flash_attention` (the idea in one screen), then `papers/flash_attention_triton` (its forward
as a kernel), `reference` (the definition, and what it costs), `memory_efficient` (softmax in chunks), `tiled`
(FlashAttention in PyTorch), `flash` (the same by kernels: what users call), `scores` (softcap, ALiBi, masks and sinks,
in all of these), `triton_forward` and `triton_backward` (the kernels), `triton_hopper`, `gluon_forward` and
`gluon_consumer` (the forward twice more, for one chip), `kernel_traffic` (the bytes that they move),
`papers/block_sparse`, `masks` and `block_sparse` (blocks of which no pair is seen are left out), `triton_block_sparse`
(its kernels), `sparse_models` (inside of models), `papers/native_sparse`, `selected_masks` and `native_sparse` (each
query picks blocks), `own_layers` (attention with parameters, in models), `linformer_projection` (keys and values
projected to k rows) and `linformer_models` (inside of encoders), `papers/linear_attention` and `linear` (a state in
place of keys and values), `which` (all of them side by side), `forward_backward_pair` (the two passes apart), `block`
(a transformer block around them), `kv_cache` (what a token leaves in a cache). `figure` draws the pages' figures. One
level down: `call` (arguments, masks, dropout), `kernels` (what the Triton kernels share) and `linear`.
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily
from .flash import flash_attention, flash_attention_bytes
from .memory_efficient import memory_efficient_attention, memory_efficient_attention_bytes
from .reference import AttentionBytes, AttentionFlops, attention_flops, reference_attention, reference_attention_bytes
from .scores import Alibi, Documents, PrefixLM, ScoreHook, Softcap, alibi_slopes
from .tiled import tiled_attention, tiled_attention_bytes

if TYPE_CHECKING:
    from ..common.attention_pair import AttentionPair
    from .block import EnhancedTransformerBlock, FlashTransformerBlock, flash_block_terms
    from .block_sparse import block_sparse_attention, block_sparse_attention_bytes, block_sparse_attention_flops
    from .forward_backward_pair import flash_pair, tiled_pair
    from .kernel_traffic import flash_attention_traffic
    from .linear.delta_rule import delta_rule_bytes, delta_rule_flops, gated_delta_rule, state_bytes
    from .linear.models import GatedDeltaAttention, chunk_gated_delta_rule, linear_attention
    from .linformer_models import LinformerAttention, LinformerProjection, linformer
    from .linformer_projection import linformer_attention, linformer_bytes, linformer_flops, linformer_parameters
    from .masks import BlockMask, bigbird_mask, causal_mask, documents_mask, longformer_mask, prefix_mask
    from .native_sparse import NativeSparseAttention, native_sparse_bytes, native_sparse_flops
    from .own_layers import in_each_layer
    from .sparse_models import MaskedAttention, OptimizedSparseAttention, sparse

__getattr__, __dir__ = lazily(__name__, {
    "..common.attention_pair": "AttentionPair",
    ".block": "EnhancedTransformerBlock FlashTransformerBlock flash_block_terms",
    ".forward_backward_pair": "flash_pair tiled_pair", ".kernel_traffic": "flash_attention_traffic",
    ".block_sparse": "block_sparse_attention block_sparse_attention_bytes block_sparse_attention_flops",
    ".linear.delta_rule": "delta_rule_bytes delta_rule_flops gated_delta_rule state_bytes",
    ".linear.models": "GatedDeltaAttention chunk_gated_delta_rule linear_attention",
    ".linformer_projection": "linformer_attention linformer_bytes linformer_flops linformer_parameters",
    ".linformer_models": "LinformerAttention LinformerProjection linformer",
    ".masks": "BlockMask bigbird_mask causal_mask documents_mask longformer_mask prefix_mask",
    ".native_sparse": "NativeSparseAttention native_sparse_bytes native_sparse_flops", ".own_layers": "in_each_layer",
    ".sparse_models": "MaskedAttention OptimizedSparseAttention sparse"})
__all__ = [
    "Alibi", "AttentionBytes", "AttentionFlops", "AttentionPair", "BlockMask", "Documents",
    "EnhancedTransformerBlock", "FlashTransformerBlock", "GatedDeltaAttention", "LinformerAttention",
    "LinformerProjection", "MaskedAttention", "NativeSparseAttention", "OptimizedSparseAttention", "PrefixLM",
    "ScoreHook", "Softcap", "alibi_slopes", "attention_flops", "bigbird_mask", "block_sparse_attention",
    "block_sparse_attention_bytes", "block_sparse_attention_flops", "causal_mask", "chunk_gated_delta_rule",
    "delta_rule_bytes", "delta_rule_flops", "documents_mask", "flash_attention", "flash_attention_bytes",
    "flash_attention_traffic", "flash_block_terms", "flash_pair", "gated_delta_rule", "in_each_layer",
    "linear_attention", "linformer", "linformer_attention", "linformer_bytes", "linformer_flops",
    "linformer_parameters", "longformer_mask", "memory_efficient_attention", "memory_efficient_attention_bytes",
    "native_sparse_bytes", "native_sparse_flops", "prefix_mask", "reference_attention", "reference_attention_bytes",
    "sparse", "state_bytes", "tiled_attention", "tiled_attention_bytes", "tiled_pair",
]
