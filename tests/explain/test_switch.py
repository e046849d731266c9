"""What is switched on from outside computes as a program that has it written in, and is off again after it."""

import outside  # noqa: F401 - so that transformers can be imported
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from refimpl.explain.switch import Switched

LLAMA = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_autocast_is_on_while_the_script_runs():
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with Switched("autocast") as switched:
        switched.on_model(model)
        assert switched.applied == 1 and not switched.refused
        assert model(x).dtype is torch.bfloat16 and torch.equal(model(x), F.linear(x, model.weight, model.bias))
    assert model(x).dtype is torch.float32


def test_attention_that_names_no_dropout_drops_nothing():
    """As the classes of transformers do that have none."""
    model, (q, k, v) = LlamaForCausalLM(LlamaConfig(**LLAMA)), torch.randn(3, 2, 2, 6, 8)
    before = model.config._attn_implementation
    with Switched("attention") as switched:
        switched.on_model(model)
        attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        output, _ = attend(model.model.layers[0].self_attn, q, k, v, None, scaling=0.5)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    assert model.config._attn_implementation == before
