"""Formulas of what CUDA alone has, against the CPU's own operations."""

import torch
from torch.nn import functional as F

from refimpl.phantom.formulas import ON_THE_CPU, aten


def test_attention_by_default_is_that_of_all_keys_without_dropout():
    """As torch calls a kernel to which it gives no more than it has to."""
    q, k, v = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    for kernel, more in ((aten._scaled_dot_product_flash_attention, ()),
                         (aten._scaled_dot_product_efficient_attention, (None, True)),
                         (aten._scaled_dot_product_cudnn_attention, (None, True))):
        out, *_ = ON_THE_CPU[kernel.default](q, k, v, *more)
        assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v), atol=1e-6)
        out, *_ = ON_THE_CPU[kernel.default](q, k, v, *more, 0.0, True)
        assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
