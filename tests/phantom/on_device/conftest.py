"""The tests in this folder run on the device without kernels: `make test-phantom`, with PyTorch's build for CUDA.

The plugin tests/kits/on_phantom.py starts it, before torch is imported. Elsewhere these tests skip themselves.
"""

import gc

import pytest
import torch

from refimpl import phantom


@pytest.fixture(autouse=True)
def clean():
    """A test begins with what a fresh process has: no garbage, no cached segments, no workspaces, no old peak."""
    if not phantom.running():
        pytest.skip("runs on the device without kernels: make test-phantom")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
