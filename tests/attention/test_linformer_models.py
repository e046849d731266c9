"""Linformer in modules and in encoders of others: padded as alone, equal to their own where E is 1, never causal."""

import copy
import functools

import outside  # noqa: F401 - before transformers
import pytest
import torch
from outside.models import SMALL, hf

from refimpl.attention import tiled_attention
from refimpl.attention.linformer_models import LinformerAttention, LinformerProjection, linformer
from refimpl.attention.linformer_projection import linformer_attention, linformer_parameters
from refimpl.equivalence import CutDiffers
from refimpl.model import GPT, GPTConfig

DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"bert": {**SMALL, **DRY}, "roberta": {**SMALL, **DRY}, "electra": {**SMALL, **DRY, "embedding_size": 64},
        "albert": {**SMALL, **DRY, "embedding_size": 64}, "esm": {**SMALL, **DRY, "mask_token_id": 3},
        "distilbert": {"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "dropout": 0.0,
                       "attention_dropout": 0.0, "max_position_embeddings": 128, "pad_token_id": 0}}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
       "patch_size": 8}
IMAGES = {"vit": "ForImageClassification", "dinov2": "ForImageClassification", "clip_vision_model": ""}


def bert(head="ForMaskedLM", **config):
    torch.manual_seed(0)
    return hf(head, "bert", **TEXT["bert"], **config)().eval()


# --- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["none", "heads", "kv"])
def test_projections_around_the_attention(share):
    torch.manual_seed(0)
    module = LinformerAttention(32, 60, 4, 5, share, attention=tiled_attention).double()
    x, there = torch.randn(2, 50, 32).double(), torch.arange(50) < torch.tensor([[50], [30]])
    q, k, v = (x @ w.T + b for w, b in zip(module.qkv.weight.chunk(3), module.qkv.bias.chunk(3), strict=True))
    q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k * there[..., None], v * there[..., None]))
    e, f = module.projection.e[..., :50], (module.projection.e if share == "kv" else module.projection.f)[..., :50]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, e @ k, f @ v)
    torch.testing.assert_close(module(x, padding=there), module.out(wanted.transpose(1, 2).flatten(2)))
    own = 33 * 96 + 33 * 32
    assert sum(p.numel() for p in module.parameters()) == own + linformer_parameters(60, 4, 5, share)


def test_layers_share_one_projection():
    first = LinformerAttention(32, 60, 4, 5, "kv")
    layers = torch.nn.ModuleList([first, *(LinformerAttention(32, 60, 4, 5, projection=first.projection)
                                           for _ in range(2))])
    assert sum(p.shape == (5, 60) for p in layers.parameters()) == 1
    layers[2](layers[1](torch.randn(1, 60, 32))).sum().backward()
    assert first.projection.e.grad.any()


def test_products_over_the_tokens_are_kept_on_average():
    torch.manual_seed(0)
    e = LinformerProjection(20, 1, 50_000).e
    torch.testing.assert_close(e.T @ e, torch.eye(20), rtol=0, atol=0.03)


CONFIG = GPTConfig(vocab_size=50, hidden=32, layers=1, heads=4, context_length=16)


@pytest.mark.parametrize("attention", [
    lambda: functools.partial(linformer_attention, e=torch.randn(4, 16)), lambda: LinformerProjection(16, 4, 5),
    lambda: LinformerAttention(32, 16, 4, 5)])
def test_a_gpt_is_refused_with_the_reason(attention):
    with pytest.raises(ValueError, match="causal=True for Linformer: .* a query would see later tokens, and no"):
        GPT(CONFIG, attention=attention())(torch.ones(1, 8, dtype=torch.long))


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXT)
def test_a_padded_sequence_gives_what_it_gives_alone(kind):
    torch.manual_seed(0)
    model = linformer(hf("ForMaskedLM", kind, **TEXT[kind])().eval(), 8)
    ids, mask = torch.randint(3, 256, (2, 20)), (torch.arange(20) < torch.tensor([[13], [20]])).long()
    with torch.no_grad():
        alone, padded, unmasked = (model(input_ids=x, **given).logits[0, :13] for x, given in (
            (ids[:1, :13], {}), (ids, {"attention_mask": mask}), (ids, {})))
    torch.testing.assert_close(padded, alone)
    assert not torch.allclose(unmasked, alone, atol=1e-3)


@pytest.mark.parametrize("kind", IMAGES)
def test_an_encoder_of_images_attends_by_it(kind):
    torch.manual_seed(0)
    model, pixels = hf(IMAGES[kind], kind, **VIT)().eval(), torch.randn(2, 3, 32, 32)
    own = model(pixel_values=pixels)[0]
    model = linformer(model, 17, seq_len=17)
    assert not torch.allclose(model(pixel_values=pixels)[0], own, atol=1e-4)
    for name, p in model.named_parameters():
        if "linformer" in name:
            p.data = torch.eye(17)
    torch.testing.assert_close(model(pixel_values=pixels)[0], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("share", "shapes"), [("none", [(4, 8, 128)] * 2), ("heads", [(8, 128)] * 2), (
    "kv", [(8, 128)])])
def test_each_layer_has_its_parameters_and_they_are_trained(share, shapes):
    model = linformer(bert().train(), 8, share=share)
    new = {name: p for name, p in model.named_parameters() if "linformer" in name}
    assert [tuple(p.shape) for p in new.values()] == 2 * shapes and {*new} <= {*model.state_dict()}
    ids = torch.randint(3, 256, (2, 20))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad[..., :20].any() and not p.grad[..., 20:].any() for p in new.values())
    model.to(torch.float64)
    assert {p.dtype for p in new.values()} == {torch.float64}


def test_a_copy_of_the_model_has_its_own():
    model, ids = linformer(bert(), 8), torch.randint(3, 256, (1, 20))
    before, copied = model(input_ids=ids).logits, copy.deepcopy(model)
    for name, p in copied.named_parameters():
        if "linformer" in name:
            p.data.zero_()
    assert torch.equal(model(input_ids=ids).logits, before) and not torch.equal(copied(input_ids=ids).logits, before)


def test_another_model_of_the_same_config_keeps_its_attention():
    one = bert()
    other, ids = type(one)(one.config).eval(), torch.randint(3, 256, (1, 20))
    before = other(input_ids=ids).logits
    linformer(one, 8)
    assert torch.equal(other(input_ids=ids).logits, before)


def with_another_rule():
    """A BERT whose attention multiplies by 2 what the registry's sdpa returns, and not what another one does."""
    from transformers.models.bert import modeling_bert

    class Attention(modeling_bert.BertSelfAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return out * (2 if self.config._attn_implementation == "sdpa" else 1), weights

    class Other(modeling_bert.BertModel):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.encoder.layer:
                layer.attention.self.__class__ = Attention

    return Other(bert().config)


def test_a_class_that_would_not_compute_the_same_is_refused():
    with pytest.raises(CutDiffers, match="Other, by Linformer with E = F = 1, would not compute what it does: what"):
        linformer(with_another_rule(), 8)


BART = {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
FUTURE = "a mask that hides pairs of tokens, as a causal one .* so a query would see later tokens"
IDS = torch.ones(1, 8, dtype=torch.long)


def cross_attention():
    layer = linformer(bert(), 8).bert.encoder.layer[0].attention.self
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 5, 16)
    return ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation](layer, q, k, k)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: linformer(hf("ForCausalLM", "llama", **SMALL)(), 8), f"llama gives its attention {FUTURE}"),
    (lambda: linformer(bert("ForCausalLM", is_decoder=True), 8), f"bert gives its attention {FUTURE}"),
    (lambda: linformer(hf("ForSeq2SeqLM", "bart", **BART)(), 8), f"bart gives its attention {FUTURE}"),
    (lambda: linformer(hf("ForMaskedLM", "modernbert", **SMALL)(), 8), f"modernbert gives its attention {FUTURE}"),
    (cross_attention, "BertSelfAttention has 3 queries and 5 keys, as cross-attention: expected self-attention"),
    (lambda: linformer(GPT(CONFIG), 8), "GPT is causal: expected an encoder, since each of the k rows"),
    (lambda: linformer(torch.nn.Linear(3, 3), 8), "how Linear computes attention is not known"),
    (lambda: linformer(hf("ForMaskedLM", "mpnet", **TEXT["bert"])(), 8), "MPNetModel takes no other attention"),
    (lambda: linformer(hf("ForCausalLM", "mamba", **SMALL)(), 8), "registry of transformers in 0 of 0 layers"),
    (lambda: linformer(hf("ForImageClassification", "vit", **VIT)(), 8), "seq_len=None: .* ViTConfig does not name"),
    (lambda: linformer(bert(), 8, seq_len=7)(IDS), r"a sequence of 8 tokens and e of shape \(8, 7\)"),
    (lambda: linformer(bert(), 8)(IDS, attention_mask=torch.ones(1, 1, 8, 8)),
     "BertSelfAttention gives its attention a mask that hides pairs"),
    (lambda: linformer(hf("ForMaskedLM", "bert", **SMALL)().train(), 8)(IDS), "dropout=0.1 of attention's weights"),
    (lambda: LinformerAttention(30, 60, 4, 5), "dim=30, heads=4: expected a multiple"),
    (lambda: LinformerAttention(32, 60, 4, 5, "layers"), "share='layers': .*layers share when one's"),
    (lambda: LinformerAttention(32, 60, 4, 5, projection=LinformerProjection(50, 4, 5)), r"of shape \(5, 50"),
    (lambda: LinformerAttention(32, 60, 4, 0), "k=0: expected at least 1")])
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_other_tensors_by_position_are_refused():
    with pytest.raises(TypeError, match="3 tensors by position: expected x"):
        LinformerAttention(32, 60, 4, 5)(*torch.randn(3, 1, 8, 32))
