"""Dry runs for a GPU, on machines without one: each operation dispatches as PyTorch's does on CUDA."""

from .dispatch import as_on_cuda

__all__ = ["as_on_cuda"]
