"""Llama-3-8B's head by PyTorch's allocator: closed forms 0 off, and no more bytes than other libraries' heads take."""

import functools

import pytest
import torch

from refimpl import memory
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    fused_cross_entropy_bytes,
    fused_linear_cross_entropy,
)

pytestmark = pytest.mark.bytes
N, V, C = 8192, 128256, 4096
FORMS = {"chunked": (chunked_linear_cross_entropy, chunked_cross_entropy_bytes),
         "fused": (fused_linear_cross_entropy, fused_cross_entropy_bytes)}
HALF, WIDE = torch.bfloat16, torch.float32
WAYS = {"sums in fp32": {}, "sums in bf16": {"weight_gradient": HALF}, "autocast": {"weight_dtype": WIDE}}
# What the same step took there of others, above its inputs, cuBLAS's workspace included: liger-kernel 0.8.5 with and
# without accum_dtype=torch.float32, and under autocast; cut-cross-entropy 25.1.1 with filter_eps=None, so without what
# it sorts words by, 1.5 MB.
LIGER = {"sums in bf16": 1_217_044_480, "sums in fp32": 3_252_723_716, "autocast": 4_369_063_936}
CUT = {"sums in bf16": 1_118_360_584, "autocast": 3_219_706_888}


@functools.cache
def read(name, way, chunk_size=None):
    """(peak of a step above its inputs, that without cuBLAS's workspace), in bytes as requested"""
    loss, options = FORMS[name][0], {key: value for key, value in WAYS[way].items() if key == "weight_gradient"}
    options |= {"chunk_size": chunk_size} if chunk_size else {}
    hidden = torch.empty(N, C, device="cuda", dtype=HALF, requires_grad=True)
    weight = torch.empty(V, C, device="cuda", dtype=WIDE if way == "autocast" else HALF, requires_grad=True)
    targets = torch.zeros(N, device="cuda", dtype=torch.int64)
    with memory.measure("cuda") as m:
        with torch.autocast("cuda", HALF, enabled=way == "autocast"):
            out = loss(hidden, weight, targets, **options)
        out.backward()
    del out, hidden, weight
    held = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return m.peak, m.peak - held + torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_the_closed_form_is_what_the_allocator_reads(name, way):
    form = FORMS[name][1](N, V, C, HALF, device="cuda", **WAYS[way])
    assert read(name, way)[1] == form.peak
    if way == "sums in fp32":  # the sum of dW, and its cast beside it
        assert form.peak < V * C * (4 + 2)


@pytest.mark.parametrize(("name", "way", "peer", "chunk_size"), [
    *[("fused", way, LIGER[way], None) for way in LIGER], *[("fused", way, CUT[way], None) for way in CUT],
    ("chunked", "sums in fp32", LIGER["sums in fp32"], None), ("chunked", "autocast", LIGER["autocast"], None),
    ("chunked", "sums in bf16", LIGER["sums in bf16"], 64)])
def test_no_more_than_another_library_at_the_same_precision(name, way, peer, chunk_size):
    assert read(name, way, chunk_size)[0] <= peer
