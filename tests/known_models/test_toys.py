"""Toys of models: small, of the same kinds of layers, and able to compute in fp64."""

import pytest
import torch
from net_kit import LLAMA, Quarters, on_meta
from torch import nn
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from refimpl.comm import FakeCommunicator
from refimpl.equivalence import CannotShrink
from refimpl.equivalence import once_per_class as once
from refimpl.equivalence.fp64 import InFP64
from refimpl.known_models.toys import LENGTH, results_of, shrunk, tokens_of, toy_of
from refimpl.pipeline.stages_proof import prove_stages
from refimpl.tensor.tensor import proven_sums


def test_ratios_patterns_and_flags_are_kept():
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 4
    small = shrunk(on_meta("gemma3_text", num_attention_heads=16, num_key_value_heads=4, hidden_size=4096, head_dim=256,
                           num_hidden_layers=24, layer_types=kinds, query_pre_attn_scalar=168).config)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (12, 3, 8)
    assert small.hidden_size == 12 * 8 and small.layer_types == kinds[:8] and small.num_hidden_layers == 8
    assert small.sliding_window == 4 < LENGTH and small.vocab_size == 96 and small.tie_word_embeddings
    assert small.intermediate_size % 12 == 0 and small.rms_norm_eps == 1e-6


@pytest.mark.parametrize(("heads", "kv", "expected"), [(32, 32, (6, 6)), (32, 8, (12, 3)), (32, 1, (6, 1)),
                                                       (64, 4, (24, 3)), (14, 2, (21, 3)), (4, 4, (6, 6))])
def test_three_ranks_can_share_the_heads(heads, kv, expected):
    small = shrunk(LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv))
    assert (small.num_attention_heads, small.num_key_value_heads) == expected


def test_a_width_that_comes_out_uneven_becomes_a_multiple_of_twelve():
    """Of 4 heads of 64 for a width of 100 a toy has 6 of 8, for a width of 18.75."""
    assert shrunk(LlamaConfig(hidden_size=100, num_attention_heads=4, head_dim=64)).hidden_size == 24


def test_a_class_that_allows_no_three_is_cut_for_four():
    toy, ranks = toy_of(Quarters(LlamaConfig(**LLAMA | {"num_key_value_heads": 4})))
    assert ranks == 4 and toy.config.num_attention_heads == toy.config.num_key_value_heads == 8
    assert toy_of(on_meta("llama"))[1] == 3


def test_a_part_of_a_head_that_is_rotated_stays_even():
    toy, _ = toy_of(on_meta("phi", partial_rotary_factor=0.4))
    assert int(toy.config.hidden_size // toy.config.num_attention_heads * 0.4) % 2 == 0


def test_a_toy_of_a_model_of_images_takes_images_of_sixteen_patches():
    toy, _ = toy_of(ViTModel(ViTConfig(num_hidden_layers=1)))
    found = results_of(toy, tokens_of(toy))["output"]
    assert tokens_of(toy).shape == (2, 3, 64, 64) and found.shape == (2, 1 + 16, 48) and found.dtype == torch.float64


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4_text", "deepseek_v3", "mamba2", "opt"])
def test_a_toy_is_small_and_all_of_it_counts(kind):
    toy, _ = toy_of(on_meta(kind))
    tokens = tokens_of(toy)
    with InFP64():
        output = toy(input_ids=tokens, labels=tokens, use_cache=False)
        output.loss.backward()
    assert sum(p.numel() for p in toy.parameters()) < 1e6 and output.loss.dtype == torch.float64
    assert all(p.grad is not None and p.grad.any() for p in toy.parameters())
    ones = [name for name, p in toy.named_parameters() if p.dim() == 1 and len({*p.tolist()}) == 1 and len(p) > 1]
    assert not ones  # a norm of ones would look like any other


def test_values_are_in_fp64_wherever_a_model_asks_for_less():
    x = torch.full((2,), 1 / 3, dtype=torch.float64)
    with InFP64():
        assert x.float().dtype == x.to(torch.float32).dtype == torch.zeros(2, dtype=torch.bfloat16).dtype == x.dtype
        assert torch.equal(x.softmax(-1, dtype=torch.float32), torch.full_like(x, 0.5))
        assert torch.ones(2).dtype == torch.tensor(0.5).dtype == torch.linspace(0, 1, 3).dtype == x.dtype
        assert torch.tensor(1).dtype == torch.arange(3).dtype == torch.int64
    assert x.float().dtype == torch.float32


def test_the_default_dtype_of_a_user_changes_no_proof(monkeypatch):
    monkeypatch.setattr(once, "_found", {})
    torch.set_default_dtype(torch.bfloat16)
    try:
        for kind in ("gemma3_text", "gpt2"):
            prove_stages(on_meta(kind))
            assert proven_sums(on_meta(kind), FakeCommunicator(0, 3)) == ()
    finally:
        torch.set_default_dtype(torch.float32)


class Wide(LlamaForCausalLM):
    """Has a size of which its config says nothing."""

    def __init__(self, config):
        super().__init__(config)
        self.wide = nn.Linear(4096, 4096)


class Fixed(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        if config.hidden_size != 50:
            raise ValueError("hidden_size has to be 50")


@pytest.mark.parametrize(("make", "said"), [
    (lambda: nn.Linear(2, 2), "Linear has no config of transformers"),
    (lambda: Wide(LlamaConfig(**LLAMA)), r"no toy of Wide can be built: ValueError: 16,.* parameters are left: a size"),
    (lambda: Fixed(LlamaConfig(**LLAMA | {"hidden_size": 50, "num_attention_heads": 5})),
     "no toy of Fixed can be built: ValueError: hidden_size has to be 50")])
def test_what_cannot_be_shrunk_is_named(make, said):
    with pytest.raises(CannotShrink, match=said):
        toy_of(make())


def test_the_config_of_the_model_does_not_change():
    config = GPT2Config()
    before = config.to_dict()
    shrunk(config)
    assert config.to_dict() == before
