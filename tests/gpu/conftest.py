"""The tests in this folder need a GPU and skip themselves where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda():
    """The current CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA GPU: torch {torch.__version__} sees none")
    return torch.device("cuda", torch.cuda.current_device())
