"""Quantised collectives of ZeRO: parameters are gathered and gradients reduced as int8, each block with its scale.

    Zero3(model, comm, optimizer, quantized_weights=BlockCodec())                 # qwZ: what a unit gathers
    Zero3(model, comm, optimizer, hook=QuantizedReduce(BlockCodec(bits=4)))       # qgZ: gradients, at any stage
    Zero3(model, comm, optimizer, quantized_weights=BlockCodec(), hook=QuantizedReduce(ranks_per_machine=8))

Shards, fp32 masters and the optimizer's state stay exact: only what travels is rounded. With one rank nothing travels,
and nothing is rounded. "ZeRO++" (Wang et al. 2023), sections 3.1 and 3.3.

Order of reading: `papers/quantized_zero` (the idea in one screen), `codec` (numbers in blocks), `gather` (parameters),
`reduce` (gradients, on one level or two), `closed_forms` (payloads, traffic, bytes in flight). On a GPU the codec runs
as two kernels: `triton_codec`, which PyTorch sees by `operators`.
"""

from .codec import BlockCodec
from .reduce import QuantizedReduce

__all__ = ["BlockCodec", "QuantizedReduce"]
