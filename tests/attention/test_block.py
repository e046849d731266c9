"""FlashTransformerBlock beside the model's block, packed sequences, and the bytes that it keeps."""

import copy

import attention_kit as kit
import pytest
import torch

from refimpl import memory
from refimpl.attention import (
    EnhancedTransformerBlock,
    FlashTransformerBlock,
    MaskedAttention,
    causal_mask,
    flash_block_terms,
    longformer_mask,
    reference_attention,
)
from refimpl.attention.block import FlashSelfAttention
from refimpl.checkpointing import checkpoint
from refimpl.model import Block, rotation_table

pytestmark = kit.in_the_interpreter()
KINDS = {
    "GPT-2": {}, "grouped": {"kv_heads": 2}, "a quarter turned": {"rotary": 64, "rotary_fraction": 0.25},
    "LLaMA": {"kv_heads": 1, "rotary": 64, "norm": "rmsnorm", "activation": "swiglu", "bias": False, "mlp_hidden": 48}}


def twin(block):
    """The model's block with dense attention and the same weights."""
    dense = Block(block.config, reference_attention)
    dense.load_state_dict(block.state_dict())
    rotary = block.config.positions == "rotary"
    return lambda x: dense(x, [t[: x.shape[1]] for t in rotation_table(block.config)] if rotary else None)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_models_block(kind):
    block, x = FlashTransformerBlock(32, 4, **KINDS[kind]), torch.randn(2, 30, 32, requires_grad=True)
    gradient, outputs = torch.randn(2, 30, 32), [f(x) for f in (block, twin(block))]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, gradient) for out in outputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cu_seqlens", [[0, 9, 30], torch.tensor([0, 9, 9, 30], dtype=torch.int32)], ids=str)
def test_packed_sequences_are_as_each_alone(kind, cu_seqlens):
    block, x = FlashTransformerBlock(32, 4, window=5, **KINDS[kind]), torch.randn(1, 30, 32)
    alone = [block(part) for part in (x[:, :9], x[:, 9:])]
    torch.testing.assert_close(block(x, cu_seqlens), torch.cat(alone, dim=1))
    assert not torch.allclose(block(x)[:, 9:], alone[1], atol=1e-3)


@pytest.mark.parametrize("attention", [
    MaskedAttention(lambda T: causal_mask(T, block=32)),
    MaskedAttention(lambda T: longformer_mask(T, 99, block=32), causal=True),
    torch.nn.functional.scaled_dot_product_attention], ids=["blocks", "blocks and causal", "of PyTorch"])
def test_any_attention_has_its_place_in_it(attention):
    torch.manual_seed(0)
    block = FlashTransformerBlock(32, 4, kv_heads=2, attention=attention)
    plain, x = FlashTransformerBlock(32, 4, kv_heads=2), torch.randn(2, 30, 32)
    plain.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(x), plain(x), rtol=1e-5, atol=1e-5)


def test_the_enhanced_block_hands_on_branch_and_residual():
    torch.manual_seed(0)
    block, x = EnhancedTransformerBlock(32, 4, attention=MaskedAttention(causal_mask)), torch.randn(2, 30, 32)
    plain = FlashTransformerBlock(32, 4)
    plain.load_state_dict(block.state_dict())
    branch, residual = block(x)
    torch.testing.assert_close(branch + residual, plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual, x + plain.attention(plain.norm1(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("options", "packed", "words"), [
    ({"window": 3}, None, "window=3 with attention=.*expected one of the two"),
    ({"dropout": 0.1}, None, "takes no dropout_p"),
    ({}, [0, 5], "cu_seqlens with attention=.*documents_mask has them")])
def test_what_another_attention_does_not_have_is_named(options, packed, words):
    with pytest.raises(ValueError, match=words):
        FlashTransformerBlock(32, 4, attention=MaskedAttention(causal_mask), **options)(torch.ones(1, 5, 32), packed)


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="parallel_residual.*expected options among.*norm"):
        FlashTransformerBlock(32, 4, parallel_residual=True)
    with pytest.raises(ValueError, match="hidden=32 is not a multiple of heads=5"):
        FlashTransformerBlock(32, 5)
    for cu_seqlens in (None, [0, 9, 12]):
        with pytest.raises(ValueError, match="sequence of (12|9) tokens with rotary=8: expected none longer"):
            FlashTransformerBlock(32, 4, rotary=8)(torch.randn(1, 12, 32), cu_seqlens)
    assert FlashTransformerBlock(32, 4, rotary=12)(torch.randn(1, 12, 32)).shape == (1, 12, 32)  # just as many
    assert isinstance(FlashTransformerBlock(32, 4).attention, FlashSelfAttention)


@pytest.mark.parametrize("kind", ["GPT-2", "LLaMA"])
@pytest.mark.parametrize("cu_seqlens", [[0, 9, 8, 20], [0, 9], [0, 9, 30], [1, 20], [0], "20"], ids=str)
def test_sequences_that_do_not_fit_are_refused_by_name(kind, cu_seqlens):
    block = FlashTransformerBlock(32, 4, **KINDS[kind])
    with pytest.raises((ValueError, TypeError), match="cu_seqlens.*expected"):
        block(torch.randn(1, 20, 32), cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2: expected"):
        block(torch.randn(2, 20, 32), [0, 20])


@pytest.mark.parametrize("kind", ["GPT-2", "LLaMA"])
def test_under_autocast_attention_is_in_16_bits(kind):
    block, seen = FlashTransformerBlock(32, 4, **KINDS[kind]), []
    attend, x = block.attention.attention, torch.randn(1, 20, 32, requires_grad=True)
    block.attention.attention = lambda *qkv, **options: seen.extend(x.dtype for x in qkv) or attend(*qkv, **options)
    expected = torch.autograd.grad(block(x).square().sum(), x)[0]
    seen.clear()
    with torch.autocast("cpu", torch.float16):
        out = block(x)
    assert seen == 3 * [torch.float16]
    torch.testing.assert_close(torch.autograd.grad(out.float().square().sum(), x)[0], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["GPT-2", "LLaMA"])
def test_built_in_a_dtype_in_a_dry_run_and_without_memory(kind):
    def step(dtype, device):
        block = FlashTransformerBlock(32, 4, dtype=dtype, device=device, **KINDS[kind])
        x = torch.randn(2, 20, 32, dtype=dtype, device=device, requires_grad=True)
        block(x).sum().backward()
        return {tensor.dtype for tensor in (*block.parameters(), *block.buffers(), x.grad)}

    for dtype in (torch.bfloat16, torch.float16):
        assert memory.dry_run(step, dtype, "cpu").result == step(dtype, "meta") == {dtype}


def test_a_window_hides_what_is_further_away():
    block, x = FlashTransformerBlock(32, 4, window=3), torch.randn(1, 20, 32)
    changed = x.clone()
    changed[:, 0] += 1
    far = (block(x) - block(changed)).abs().amax(dim=(0, 2))
    assert (far[:4] > 0).all() and (far[4:] == 0).all()


def test_dropout_while_training_only():
    block, x = FlashTransformerBlock(32, 4, dropout=0.5), torch.randn(1, 20, 32)
    assert not torch.equal(block(x), block(x))
    assert torch.equal(block.eval()(x), block(x))
    again = copy.deepcopy(block.train())
    torch.manual_seed(3)
    first = block(x)
    torch.manual_seed(3)
    assert torch.equal(first, again(x))


def test_recomputed_it_gives_the_same_gradients_with_dropout():
    block, x = FlashTransformerBlock(32, 4, dropout=0.3), torch.randn(1, 20, 32, requires_grad=True)
    found = []
    for run in (block, lambda x: checkpoint(block, x)):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(run(x).sum(), [x, *block.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_kept_are_exact_and_linear_and_the_dense_block_fails_here(kind, dropout):
    block = FlashTransformerBlock(32, 4, dropout=dropout, **KINDS[kind])
    ours, full = ({s: kept_by(module, s) for s in (24, 48)} for module in (block, twin(block)))
    for s in (24, 48):
        assert ours[s] == sum(flash_block_terms(block.config, 2, s).values()) < full[s]
    assert ours[48] == pytest.approx(2 * ours[24], rel=2e-3) and full[48] > 2.1 * full[24]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_keeps_where_its_sequences_end_and_their_positions(kind):
    block = FlashTransformerBlock(32, 4, dtype=torch.float16, **KINDS[kind])
    turned = block.config.rotary_dim if "rotary" in KINDS[kind] else 0
    expected = sum(flash_block_terms(block.config, 1, 24, torch.float16).values()) + 8 * 4 + 2 * 24 * turned * 2
    assert kept_by(block, 24, 1, torch.float16, [0, 5, 5, 24]) == expected


def kept_by(block, s, batch=2, dtype=torch.float32, cu_seqlens=None):
    """Bytes of activations between forward and backward."""
    x = torch.randn(batch, s, 32, dtype=dtype, requires_grad=True)
    with memory.track(x) as t:
        out = block(x * 1, *filter(None, [cu_seqlens]))  # noqa: F841 - what comes in: an activation of the layer before
        return t.now["activations"]
