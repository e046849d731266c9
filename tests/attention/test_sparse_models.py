"""Block-sparse attention in modules and in models of others: equal to their own where the mask hides nothing more."""

import functools

import outside  # noqa: F401 - before transformers
import pytest
import torch
from outside.models import SMALL, hf, text

from refimpl.attention import MaskedAttention, OptimizedSparseAttention, causal_mask, longformer_mask, sparse
from refimpl.equivalence import CutDiffers
from refimpl.model import GPT, GPTConfig


def window(T, block=32):
    return longformer_mask(T, 5, 2, block=block)


def masked(model, T):
    """The mask of `window`, joined with a causal one, as transformers takes it: 4-D, numbers to add."""
    seen = (window(T) & causal_mask(T, block=32)).dense()
    return torch.zeros(1, 1, T, T).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2", "gpt_neox", "phi3"])
def test_a_decoder_of_transformers_attends_under_the_mask(kind):
    torch.manual_seed(0)
    config = {**SMALL, "attention_dropout": 0.0, "num_key_value_heads": 2}
    own = hf("ForCausalLM", kind, **config)()
    own.set_attn_implementation("eager")
    given = text(batch=2)()
    T = given["input_ids"].shape[1]
    ids = given["input_ids"]
    wanted = own(input_ids=ids, labels=ids, attention_mask=masked(own, T), use_cache=False).loss
    wanted.backward()
    gradients = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    own.zero_grad()
    found = sparse(own, window)(input_ids=ids, labels=ids).loss
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for name, p in own.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-5)


def test_our_gpt_attends_under_the_mask():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=50, hidden=32, layers=2, heads=4, kv_heads=2, context_length=64)
    model, tokens = GPT(config), torch.randint(0, 50, (2, 40))

    def dense(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(window(40) & causal_mask(40, block=32)).dense())

    from refimpl.model import Attention
    whole = model(tokens)
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_attention(dense)
    wanted = model(tokens)
    torch.testing.assert_close(sparse(model, window)(tokens), wanted)
    assert not torch.allclose(wanted, whole)
    torch.testing.assert_close(sparse(model, lambda T: causal_mask(T))(tokens), whole)


def test_another_model_of_the_same_config_keeps_its_attention():
    ids, config = torch.ones(1, 40, dtype=torch.long), llama().config
    one, other = (type(llama())(config).eval() for _ in range(2))
    before = other(input_ids=ids).logits
    sparse(one, window)
    assert torch.equal(other(input_ids=ids).logits, before)
    names = {module.config._attn_implementation for module in one.modules() if hasattr(module, "config")}
    assert len(names) == 1 and names != {other.config._attn_implementation}


def test_a_window_of_the_model_and_the_mask_both_hold():
    torch.manual_seed(0)
    model = hf("ForCausalLM", "mistral", **SMALL, num_key_value_heads=2, sliding_window=4)()
    ids = text(batch=1)()["input_ids"]
    model.set_attn_implementation("eager")
    own = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(sparse(model, causal_mask)(input_ids=ids).logits, own, rtol=1e-4, atol=1e-4)


def test_projections_around_a_window():
    torch.manual_seed(0)
    module, x = OptimizedSparseAttention(32, 4, window_size=6, global_tokens=2, kv_heads=2), torch.randn(2, 50, 32)
    qkv = module.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2)
    q, k, v = qkv.split([4, 2, 2], 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=longformer_mask(50, 6, 2).dense())
    torch.testing.assert_close(module(x), module.out(wanted.transpose(1, 2).flatten(2)))
    assert sum(p.numel() for p in module.parameters()) == 33 * 64 + 33 * 32


def test_a_mask_is_made_once_for_each_length():
    made = []
    attention = MaskedAttention(lambda T: made.append(T) or causal_mask(T))
    for T in (5, 9, 5, 9, 5):
        attention(*(torch.randn(1, 2, T, 4) for _ in range(3)))
    assert made == [5, 9]


def llama():
    return hf("ForCausalLM", "llama", **SMALL)()


def with_another_rule():
    """A Llama whose attention multiplies by 2 what it hands to the registry: a class that this change would not see."""
    from transformers.models.llama import modeling_llama

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return out * (2 if self.config._attn_implementation == "sdpa" else 1), weights

    class Other(modeling_llama.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.__class__ = Attention

    return Other(llama().config)


def test_a_class_that_would_not_compute_the_same_is_refused():
    with pytest.raises(CutDiffers, match="by block-sparse attention under a full causal mask, would not compute"):
        sparse(with_another_rule(), causal_mask)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: sparse(llama(), "window"), TypeError, "mask='window': expected a BlockMask, or a function"),
    (lambda: sparse(torch.nn.Linear(3, 3), causal_mask), ValueError, "how Linear computes attention is not known"),
    (lambda: sparse(GPT(GPTConfig(vocab_size=5, hidden=8, layers=1, heads=2, context_length=8, dropout=0.1)),
                    causal_mask), ValueError, "dropout=0.1: expected 0"),
    (lambda: sparse(hf("ForCausalLM", "mamba", **SMALL)(), causal_mask), ValueError, "takes no attention from the reg"),
    (lambda: sparse(llama(), causal_mask).model(torch.ones(1, 8, dtype=torch.long), attention_mask=torch.eye(8)[:1]),
     ValueError, "an attention_mask beside a mask of blocks"),
    (lambda: sparse(llama(), causal_mask(9))(torch.ones(1, 8, dtype=torch.long)), ValueError,
     "a mask of 9 queries and 9 keys with 8 tokens"),
    (lambda: sparse(llama(), lambda T: T)(torch.ones(1, 8, dtype=torch.long)), TypeError, "returned a int for 8"),
    (lambda: sparse(llama(), causal_mask)(torch.ones(1, 8, dtype=torch.long), use_cache=True), ValueError, "use_cache"),
    (lambda: sparse(llama(), causal_mask)(torch.ones(1, 8, dtype=torch.long), attention_mask=torch.eye(8)[:1]),
     ValueError, "an attention_mask beside a mask of blocks"),
    (lambda: sparse(llama(), causal_mask)(torch.ones(1, 8, dtype=torch.long), torch.eye(8)[:1]), ValueError,
     "2 arguments by position: expected the tokens alone"),
    (lambda: sparse(llama(), causal_mask)(torch.ones(1, 8, dtype=torch.long),
                                          position_ids=torch.arange(8)[None] % 4), ValueError, "begin again"),
    (lambda: MaskedAttention(3), TypeError, "mask=3: expected a BlockMask, or a function of the length"),
    (lambda: OptimizedSparseAttention(30, 4), ValueError, "hidden_size=30, num_heads=4, kv_heads=4"),
    (lambda: OptimizedSparseAttention(32, 4, -1), ValueError, "window_size=-1: expected at least 0")])
def test_what_does_not_fit_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_mask_that_hides_nothing_is_left_out():
    assert not MaskedAttention(causal_mask).causal  # unless it is asked for
    model, ids = llama(), torch.ones(2, 8, dtype=torch.long)
    plain = model(ids).logits
    sparse(model, functools.partial(causal_mask, block=32))
    torch.testing.assert_close(model(ids, attention_mask=torch.ones(2, 8)).logits, plain, rtol=1e-5, atol=1e-5)
