"""An MLP whose hidden layer is not kept: computed again in backward, or kept once, and some tokens at a time.

The hidden layer of N tokens is h wide, four times d or so, and autograd keeps it more than once:

    act(x Uᵀ) Dᵀ                     plain: x Uᵀ and act(x Uᵀ)                          2 · N·h
    (act(x Gᵀ) ∘ x Uᵀ) Dᵀ            plain: x Gᵀ, x Uᵀ, act(x Gᵀ) and their product     4 · N·h     SwiGLU and the like

    keep="input"       nothing but x, which the layer before gave; backward multiplies x by U (and G) again:
                       7 matrix products of this size instead of 6, or 11 instead of 9
    keep="hidden"      what goes into the activation, 1 or 2 · N·h; backward computes activations again, no product

A token's hidden layer is of use for that token alone. So forward and backward can go `chunk_size` tokens at a time,
too: then neither holds more than a chunk of whatever is not kept. Recomputation: "Training Deep Nets with Sublinear
Memory Cost" (Chen et al. 2016). Chunks of a feed-forward layer: "Reformer" (Kitaev et al. 2020), section 3. SwiGLU:
"GLU Variants Improve Transformer" (Shazeer 2020).
"""

from .closed_forms import COMPOSED, MLPBytes, mlp_bytes, plain_mlp_saved_bytes
from .function import ACTIVATIONS, GATED
from .layer import MemoryEfficientMLP, memory_efficient_mlps

__all__ = ["ACTIVATIONS", "COMPOSED", "GATED", "MLPBytes", "MemoryEfficientMLP", "memory_efficient_mlps", "mlp_bytes",
           "plain_mlp_saved_bytes"]
