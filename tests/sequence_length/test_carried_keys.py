"""Carried keys and values: their bytes, the mask of a chunk, and that nothing stays behind."""

import pytest
import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor, carried_bytes
from refimpl.sequence_length.carried_keys import Carried, _Mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bytes_of_keys_and_values(family, name, dtype):
    config = family(name)
    new = torch.zeros(2, config.kv_heads, 32, config.head_dim, dtype=dtype)
    carried = Carried(GPT(config, dtype=dtype), 2, 100)
    places = [(layer, which) for layer in range(config.layers) for which in (0, 1)]
    assert sum(carried.values(place, new).nbytes for place in places) == carried_bytes(config, 2, 100, dtype)
    assert all(carried.values(place, new) is carried.values(place, new) for place in places)
    process = ChunkedSequenceProcessor(GPT(config, dtype=dtype), 32)
    with memory.track(process.model) as t:
        for _ in process.logits(torch.zeros(2, 100, dtype=torch.int64)):
            assert t.now["keys and values"] == carried_bytes(config, 2, 100, dtype)
        assert "keys and values" not in t.now


def test_the_mask_of_a_chunk_is_aligned_bottom_right():
    """torch's own is_causal is not: with it the first query of a chunk would see the first key alone."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    expected, mask = softmax_attention(q, k, v, causal=True), _Mask(4, 7).like(q)
    assert mask.isinf().tolist() == [[False] * (5 + row) + [True] * (2 - row) for row in range(3)]
    assert torch.allclose(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, atol=1e-6)
    assert not torch.allclose(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-2)


class Dense(torch.nn.Module):
    """An attention that is a module, and registered as one."""
    def forward(self, q, k, v, *, causal=False):
        return softmax_attention(q, k, v, causal=causal)


@pytest.mark.parametrize("attention", [softmax_attention, F.scaled_dot_product_attention, Dense()])
def test_attentions_are_as_they_were_also_after_an_exception(family, attention):
    model, tokens = GPT(family("gpt2"), attention), torch.zeros(1, 8, dtype=torch.int64)
    layers = [block.attention for block in model.blocks]
    before, names = [layer.attention for layer in layers], [sorted(vars(layer)) for layer in layers]
    process = ChunkedSequenceProcessor(model, 4)
    process(tokens, tokens).backward()
    model.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    for call in (lambda: process(tokens, tokens), lambda: list(process.logits(tokens))):
        with pytest.raises(ZeroDivisionError):
            call()
        assert [layer.attention for layer in layers] == before and [sorted(vars(layer)) for layer in layers] == names


def test_between_two_chunks_of_logits_the_model_is_free(family):
    model, tokens = GPT(family("gpt2")), torch.randint(0, 300, (1, 8))
    expected, parts = model(tokens), ChunkedSequenceProcessor(model, 4).logits(tokens)
    first = next(parts)
    assert torch.equal(model(tokens), expected)
    assert torch.allclose(torch.cat((first, next(parts)), 1), expected, atol=1e-6)


def top_left(q, k, v, causal=False):
    """The obvious wrapper, and right as long as there are as many queries as keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def blind(q, k, v, causal=False):
    return softmax_attention(q, k, v)


@pytest.mark.parametrize("attention", [top_left, blind])
def test_an_attention_that_aligns_its_mask_otherwise_is_refused(family, attention):
    model, tokens = GPT(family("gpt2", layers=1), attention), torch.zeros(1, 8, dtype=torch.int64)
    process = ChunkedSequenceProcessor(model, 4)
    for call in (lambda: process(tokens, tokens), lambda: list(process.logits(tokens))):
        with pytest.raises(ValueError, match="the last query must see all keys .* give scaled_dot_product_attention"):
            call()
    assert model.blocks[0].attention.attention is attention
