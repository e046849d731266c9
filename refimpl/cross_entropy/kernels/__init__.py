"""What the Triton kernels of a head share: `tile` (logits and gradient of a tile, a launch), `configs` (tile sizes),
`operators` (the kernels as PyTorch operators)."""
