"""Hooks, sinks, values of another width and packing without a wait, on a CUDA device."""

import pytest
import torch
from attention_kit import assert_as_exact_as_plain, gradients, inputs

from refimpl import memory
from refimpl.attention import (
    Alibi,
    Documents,
    PrefixLM,
    Softcap,
    alibi_slopes,
    flash_attention,
    flash_attention_bytes,
    reference_attention,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H, S = 4, 330


def options_of(name, dtype, device="cuda"):
    """The options of a variant."""
    ids = torch.randint(0, 3, (2, S), generator=torch.Generator().manual_seed(0)).to(device)
    sinks = torch.linspace(-2, 3, H, device=device).to(dtype).requires_grad_()
    return {
        "softcap": {"score": Softcap(5.0), "causal": True, "window": 100},
        "ALiBi": {"score": Alibi(alibi_slopes(H, device))},
        "documents": {"score": Documents(ids), "causal": True},
        "prefix": {"score": PrefixLM(torch.tensor([0, 150], device=device))},
        "sinks": {"sinks": sinks, "causal": True, "window": 64},
        "all": {"score": [Softcap(5.0), Alibi(alibi_slopes(H, device)), Documents(ids), PrefixLM(
            torch.tensor([40, 150], device=device))], "sinks": sinks, "dropout_p": 0.2, "seed": 3},
        "none": {"causal": True},
    }[name]


@pytest.mark.parametrize(("D", "V"), [(64, 64), (128, 128), (192, 128), (40, 111)])
@pytest.mark.parametrize("name", ["softcap", "ALiBi", "documents", "prefix", "sinks", "all", "none"])
def test_as_exact_as_plain_attention(name, D, V, cuda):
    for dtype, T in ((BF16, 330), (FP16, 201)):
        given = inputs(2, H, 2, T, S, D, dtype, device=cuda, V=V)
        assert_as_exact_as_plain(flash_attention, reference_attention, *given, **options_of(name, dtype))
    if name == "all":  # fp32's rule is another, and one of its kernels serves all
        given = inputs(2, H, 2, 201, S, D, FP32, device=cuda, V=V)
        assert_as_exact_as_plain(flash_attention, reference_attention, *given, **options_of(name, FP32))


@pytest.mark.bytes
@pytest.mark.parametrize("name", ["documents", "prefix", "sinks"])
def test_bytes_are_the_closed_forms(name, cuda):
    shape, keys, options = (2, H, S, 192), (2, 2, S, 192), options_of(name, BF16)
    q, k, v, gradient = inputs(2, H, 2, S, S, 192, BF16, device=cuda, V=128)
    gradients(flash_attention, q, k, v, gradient, **options)  # compiles
    with memory.track(q, k, v, gradient, *(x for x in (options.get("sinks"),) if x is not None)) as t:
        out = flash_attention(q, k, v, **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    sinks = options["sinks"].dtype if "sinks" in options else None
    assert flash_attention_bytes(shape, keys, BF16, v_dim=128, sinks=sinks) == (kept, t.peak.total - t.start.total)


def test_packed_sequences_without_a_wait(cuda):
    """PyTorch raises wherever the host would wait for the device; without max_seqlen it does (the mutant)."""
    q, k, v, gradient = inputs(1, H, 2, S, S, 64, BF16, device=cuda)
    ends = torch.tensor([0, 100, 100, 101, S], dtype=torch.int32, device=cuda)
    expected = gradients(flash_attention, q, k, v, gradient, causal=True, cu_seqlens=ends)  # compiles
    gradients(flash_attention, q, k, v, gradient, causal=True, cu_seqlens=ends, max_seqlen=229)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(flash_attention, q, k, v, gradient, causal=True, cu_seqlens=ends, max_seqlen=229)
        with pytest.raises(RuntimeError, match="synchroniz"):
            flash_attention(q, k, v, causal=True, cu_seqlens=ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, found, expected))
