"""The loss of a language model's head, without its logits.

Order of reading: `papers/cross_entropy` (the idea in one screen), then `rows` (the loss and gradient of some rows of
logits), `chunked` (all rows, some at a time: what users call; several losses; a vocabulary split over ranks),
`weight_gradient` (while it adds up), `closed_forms` (its bytes, and those of the head with logits), `model_loss` (in
models of transformers, and our GPT). Then the same by Triton kernels: `fused` (what users call), `triton_forward`,
`triton_backward`; one level down, `kernels` is what these share. `call` checks arguments.
"""

from .chunked import chunked_linear_cross_entropy, default_chunk_size, multi_token_cross_entropy
from .closed_forms import (
    HeadBytes,
    chunked_cross_entropy_bytes,
    plain_cross_entropy_bytes,
    split_cross_entropy_traffic,
)
from .fused import fused_cross_entropy_bytes, fused_linear_cross_entropy, fused_multi_token_cross_entropy
from .model_loss import without_logits

__all__ = [
    "HeadBytes", "chunked_cross_entropy_bytes", "chunked_linear_cross_entropy", "default_chunk_size",
    "fused_cross_entropy_bytes", "fused_linear_cross_entropy", "fused_multi_token_cross_entropy",
    "multi_token_cross_entropy", "plain_cross_entropy_bytes", "split_cross_entropy_traffic", "without_logits",
]
