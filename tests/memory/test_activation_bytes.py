"""What the GPT keeps for backward: the closed form against the tracker, and beside Korthikanti's."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from refimpl import memory
from refimpl.memory import activation_bytes, block_terms, korthikanti_bytes, korthikanti_terms
from refimpl.model import GPT, GPTConfig, softmax_attention

GPT2 = {"vocab_size": 256, "context_length": 4096, "layers": 2, "hidden": 64, "heads": 4}
LLAMA = GPT2 | {"kv_heads": 2, "mlp_hidden": 176, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary",
                "bias": False, "tied": False}
NEOX = GPT2 | {"positions": "rotary", "rotary_fraction": 0.25, "parallel_residual": True, "tied": False}


def kept_after_forward(config, batch, sequence, dtype):
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    model = GPT(config, dtype=dtype)
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
    assert loss.isfinite()
    return t.now["activations"]


@settings(max_examples=40, deadline=None)
@given(family=st.sampled_from([GPT2, LLAMA, NEOX]), batch=st.integers(1, 4), layers=st.integers(1, 3),
       sequence=st.sampled_from([2, 7, 32, 65, 128]), heads=st.sampled_from([2, 4, 8]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), dropout=st.sampled_from([0.0, 0.1]))
def test_the_closed_form_is_what_autograd_keeps(family, batch, sequence, layers, heads, dtype, dropout):
    config = GPTConfig(**family | {"layers": layers, "heads": heads, "kv_heads": min(heads, 2), "dropout": dropout})
    # 1 % is what is asked for; 0 bytes is what it reads. (One token alone is left out: its q, k, v are never copied.)
    assert activation_bytes(config, batch, sequence, dtype) == kept_after_forward(config, batch, sequence, dtype)


def test_a_block_that_recomputes_its_attention_is_noticed():
    """The mutant: attention that keeps no scores. The closed form of the dense one must not fit it."""

    def frugal(q, k, v):
        return checkpoint(partial(softmax_attention, causal=True), q, k, v, use_reentrant=False)

    config, tokens = GPTConfig(**GPT2), torch.zeros(2, 128, dtype=torch.int64)
    model = GPT(config, frugal)
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
    assert loss.isfinite()
    scores = config.layers * 4 * config.heads * 2 * 128 * 128
    assert t.now["activations"] < activation_bytes(config, 2, 128) - 0.9 * scores


def test_korthikantis_terms_sum_to_their_formula():
    config = GPTConfig(hidden=256, heads=8)
    assert sum(korthikanti_terms(config, 3, 128).values()) == korthikanti_bytes(config, 3, 128)
    sbh = 2048 * 4 * 6144  # their 22B model, micro-batch 4
    published = sbh * (34 + 5 * 64 * 2048 / 6144)
    assert korthikanti_bytes(GPTConfig.named("korthikanti-22b"), 4, 2048) == pytest.approx(published, rel=1e-12)


def test_the_difference_from_korthikanti_is_named_term_by_term():
    """Same block, 16 bits, dropout, CUDA's one-byte masks: only what they leave out as small remains."""
    config = GPTConfig(hidden=256, heads=8, dropout=0.1)
    s, b, a = 128, 3, 8
    ours, theirs = block_terms(config, b, s, torch.bfloat16, "cuda"), korthikanti_terms(config, b, s)
    assert {name: ours[name] - theirs.get(name, 0) for name in ours if ours[name] != theirs.get(name, 0)} == {
        "norm statistics": 2 * 2 * 4 * s * b, "causal mask": s * s}
    assert set(theirs) <= set(ours)
    # On the CPU dropout keeps the 2-byte noise that it multiplied with, and LayerNorm's statistics are 16-bit.
    cpu = block_terms(config, b, s, torch.bfloat16, "cpu")
    assert {name: cpu[name] - ours[name] for name in ours if cpu[name] != ours[name]} == {
        "norm statistics": -2 * 2 * 2 * s * b, "softmax dropout mask": a * b * s * s,
        "attention dropout mask": s * b * 256, "MLP dropout mask": s * b * 256}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_terms_have_no_zeros_and_sum_to_the_total(device):
    config = GPTConfig(**LLAMA)
    terms = memory.activation_terms(config, 2, 64, torch.bfloat16, device)
    assert all(terms.values()) and sum(terms.values()) == activation_bytes(config, 2, 64, torch.bfloat16, device)
    assert terms["blocks"] == 2 * sum(block_terms(config, 2, 64, torch.bfloat16, device).values())
