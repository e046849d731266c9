"""What the GPT keeps for backward: the closed form against the tracker, and beside Korthikanti's."""

from dataclasses import replace
from functools import partial

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from refimpl import memory
from refimpl.memory import activation_bytes, activation_terms, block_terms, korthikanti_bytes, korthikanti_terms
from refimpl.model import GPT, GPTConfig, softmax_attention

GPT2 = {"vocab_size": 256, "context_length": 4096, "layers": 2, "hidden": 64, "heads": 4}
LLAMA = GPT2 | families.LLAMA | {"mlp_hidden": 176}
# What changes what is kept, besides norm, parallel residual and dtype, which each run all through.
CHOICES = {name: st.sampled_from(values) for name, values in {
    "layers": [1, 2, 3], "heads_and_groups": [(1, 1), (4, 4), (4, 2), (4, 1), (8, 2)], "head_dim": [None, 24],
    "activation": ["gelu", "swiglu", "geglu"], "positions": ["learned", "rotary"], "rotary_fraction": [0.25, 1.0],
    "mlp_hidden": [None, 176], "dropout": [0.0, 0.1], "post_norms": [False, True], "qkv_bias": [False, True],
    "bias": [False, True], "tied": [False, True]}.items()}


def kept_after_forward(config, tokens, targets, dtype=torch.float32, attention=softmax_attention):
    model = GPT(config, attention, dtype=dtype)
    with memory.track(model, tokens, targets) as t:
        loss = model(tokens, targets)
    assert loss.isfinite()
    return t.now["activations"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("parallel_residual", [False, True])
@settings(max_examples=12, deadline=None)
@given(rest=st.fixed_dictionaries(CHOICES), batch=st.integers(1, 4), sequence=st.sampled_from([2, 7, 32, 65]))
def test_the_closed_form_is_what_autograd_keeps(norm, parallel_residual, dtype, rest, batch, sequence):
    heads, groups = rest["heads_and_groups"]
    fields = {name: value for name, value in rest.items() if name != "heads_and_groups"}
    config = GPTConfig(vocab_size=256, context_length=4096, hidden=64, heads=heads, kv_heads=groups, norm=norm,
                       parallel_residual=parallel_residual, **fields)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    # 1 % is what is asked for; 0 bytes is what it reads.
    assert activation_bytes(config, batch, sequence, dtype) == kept_after_forward(config, tokens, tokens, dtype)


def test_int32_targets_are_copied_for_the_loss():
    """Two cases that the closed form leaves out and its docstring names: this, and one token alone."""
    config, tokens = GPTConfig(**GPT2), torch.zeros(3, 32, dtype=torch.int64)
    expected = activation_bytes(config, 3, 32)
    assert kept_after_forward(config, tokens.int(), tokens) == expected
    assert kept_after_forward(config, tokens, tokens.int()) == expected + 8 * 32 * 3
    more = kept_after_forward(config, tokens[:1, :1], tokens[:1, :1]) - activation_bytes(config, 1, 1)
    assert 0 < more <= config.layers * 2 * 4 * config.hidden


def test_a_block_that_recomputes_its_attention_is_noticed():
    """The mutant: attention that keeps no scores. The closed form of the dense one must not fit it."""
    def frugal(q, k, v):
        return checkpoint(partial(softmax_attention, causal=True), q, k, v, use_reentrant=False)
    config, tokens = GPTConfig(**GPT2), torch.zeros(2, 128, dtype=torch.int64)
    scores = config.layers * 4 * config.heads * 2 * 128 * 128
    kept = kept_after_forward(config, tokens, tokens, attention=frugal)
    assert kept < activation_bytes(config, 2, 128) - 0.9 * scores


def test_korthikantis_terms_sum_to_their_formula():
    config = GPTConfig(hidden=256, heads=8)
    assert sum(korthikanti_terms(config, 3, 128).values()) == korthikanti_bytes(config, 3, 128)
    published = 2048 * 4 * 6144 * (34 + 5 * 64 * 2048 / 6144)  # their 22B model, micro-batch 4
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


def test_each_term_of_a_llama_block_on_cuda():
    """Counted by hand, apart from the code: RMSNorm is one kernel there, and dropout keeps booleans."""
    config = GPTConfig(**LLAMA, dropout=0.1)
    s, b, h, f = 16, 3, 64, 176
    sbh = s * b * h
    expected = {
        "norm inputs": 2 * 2 * sbh, "norm statistics": 2 * 4 * s * b, "qkv input": 2 * sbh,
        "queries and keys": 2 * (sbh + sbh // 2), "values": 2 * (sbh // 2), "causal mask": 2 * s * s,
        "softmax output": 2 * 4 * b * s * s, "softmax dropout mask": 4 * b * s * s,
        "softmax dropout output": 2 * 4 * b * s * s, "projection input": 2 * sbh, "attention dropout mask": sbh,
        "MLP input": 2 * sbh, "SiLU input": 2 * s * b * f, "SiLU output": 2 * s * b * f, "up output": 2 * s * b * f,
        "down input": 2 * s * b * f, "MLP dropout mask": sbh}
    assert block_terms(config, b, s, torch.bfloat16, "cuda:1") == expected
    # Both norms of a parallel residual read the same x, and the kernel keeps x itself.
    parallel = block_terms(replace(config, parallel_residual=True), b, s, torch.bfloat16, torch.device("cuda"))
    assert parallel == expected | {"norm inputs": 2 * sbh}
    assert activation_terms(config, b, s, torch.bfloat16, "cuda") == {
        "blocks": 2 * sum(expected.values()), "rotation": 2 * 2 * s * 16, "embedding dropout mask": sbh,
        "last norm": 2 * sbh + 4 * s * b, "head input": 2 * sbh, "log-probabilities": 4 * s * b * 256, "loss weight": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_cudas_kernels_keep_is_what_torchs_shape_rules_say(dtype):
    """No GPU needed: a fake tensor on "cuda" knows what each kernel would return, and backward is given just that."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(6, 64, dtype=dtype, device="cuda")
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, [64], None, None, 1e-5)
        _, rms_rstd = torch.ops.aten._fused_rms_norm(x, [64], None, 1e-5)
        _, mask = torch.ops.aten.native_dropout(x, 0.1, True)
    for norm, statistics in (("layernorm", mean.nbytes + rstd.nbytes), ("rmsnorm", rms_rstd.nbytes)):
        terms = block_terms(GPTConfig(**GPT2, norm=norm, dropout=0.1), 2, 3, dtype, "cuda")
        assert terms["norm inputs"] == 2 * x.nbytes and terms["norm statistics"] == 2 * statistics
        assert terms["attention dropout mask"] == terms["MLP dropout mask"] == mask.nbytes
        assert "RMSNorm x/σ" not in terms


@pytest.mark.parametrize("form", [
    block_terms, activation_terms, activation_bytes, korthikanti_terms, korthikanti_bytes])
def test_sizes_that_are_none_are_refused(form):
    config = GPTConfig(**GPT2)
    for batch, sequence, named in ((0, 8, "batch=0"), (-2, 8, "batch=-2"), (2, 8.0, r"sequence=8\.0"),
                                   (True, 8, "batch=True"), (2, -1, "sequence=-1"), (2, "8", "sequence='8'")):
        with pytest.raises(ValueError, match=f"{named}: expected an integer of at least 1"):
            form(config, batch, sequence)


@pytest.mark.parametrize("form", [block_terms, activation_terms, activation_bytes])
def test_types_and_devices_that_keep_nothing_known_are_refused(form):
    for dtype in (torch.int64, "bfloat16", None):
        with pytest.raises(ValueError, match=f"dtype={dtype!r}: expected that of the activations"):
            form(GPTConfig(**GPT2), 1, 8, dtype)
    for device in ("meta", torch.device("mps"), "gpu"):
        with pytest.raises(ValueError, match=f"device='{device}': .* expected 'cpu' or 'cuda'"):
            form(GPTConfig(**GPT2), 1, 8, torch.float32, device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_terms_have_no_zeros_and_sum_to_the_total(device):
    config = GPTConfig(**LLAMA)
    terms = activation_terms(config, 2, 64, torch.bfloat16, device)
    assert all(terms.values()) and sum(terms.values()) == activation_bytes(config, 2, 64, torch.bfloat16, device)
    assert terms["blocks"] == 2 * sum(block_terms(config, 2, 64, torch.bfloat16, device).values())
