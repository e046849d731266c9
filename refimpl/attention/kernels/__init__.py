"""What the Triton kernels stand on. In reading order: `tile` has the parts that kernels share (addresses, masks,
dropout) and their launch, `configs` the sizes of tiles for each chip, `operators` makes the kernels known to PyTorch.
"""
