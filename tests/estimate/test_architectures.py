"""The class that `architectures` names is built, or refused: counts of published weights, batches, sentences."""


import outside  # noqa: F401 - so that transformers can be imported
import pytest
import torch
from estimate_kit import BERT, CONFIGS

from refimpl.estimate import Options, estimate
from refimpl.estimate.model_sources import find

# What the published config.json of each says, and the count of the published weights.
PUBLISHED = {
    "bert-base-uncased": (109_514_298, {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}),
    "roberta-base": (124_697_433, {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50265, "hidden_size": 768,
        "max_position_embeddings": 514, "type_vocab_size": 1, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "pad_token_id": 1}),
    "distilbert-base-uncased-finetuned-sst-2-english": (66_955_010, {
        "model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"], "vocab_size": 30522,
        "dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 6, "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}),
    "t5-small": (60_506_624, {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128, "d_model": 512,
        "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}),
    "whisper-tiny": (37_760_640, {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 51865,
        "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "num_mel_bins": 80,
        "max_source_positions": 1500, "max_target_positions": 448}),
    "vit-base-patch16-224": (86_567_656, {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 768, "image_size": 224,
        "patch_size": 16, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "id2label": {str(n): f"class {n}" for n in range(1000)}}),
    "opt-125m": (125_239_296, {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": 768,
        "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768}),
    "phi-2": (2_779_683_840, {
        "model_type": "phi", "architectures": ["PhiForCausalLM"], "vocab_size": 51200, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
        "max_position_embeddings": 2048}),
    "Qwen3-0.6B": (596_049_920, {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True}),
    "Mixtral-8x7B-v0.1": (46_702_792_704, {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "max_position_embeddings": 32768}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_class_that_is_named_is_built_with_the_published_count(written, name):
    count, config = PUBLISHED[name]
    with torch.device("meta"):
        source = find(written(config), Options(batch=2, sequence=None if "vit" in name else 8))
        model, _, batch = source.build()
    assert type(model).__name__ == config["architectures"][0] and source.built_by.endswith(config["architectures"][0])
    assert sum(p.numel() for p in model.parameters()) == count
    assert {len(each) for each in batch.values()} == {2}


@pytest.mark.parametrize(("name", "shapes", "words"), [
    ("masked", {"input_ids": (3, 32), "labels": (3, 32)}, "3 × 32 tokens"),
    ("classifier", {"input_ids": (3, 32), "labels": (3,)}, "3 × 32 tokens"),
    ("whisper", {"input_features": (3, 8, 40), "labels": (3, 12)}, "3 × 8 × 40 features, 3 × 12 tokens"),
    ("vit", {"pixel_values": (3, 3, 16, 16), "labels": (3,)}, "3 × 3 × 16 × 16 pixels")])
def test_the_batch_is_what_its_loss_is_made_of(written, name, shapes, words):
    source = find(written(CONFIGS[name]), Options(batch=3))
    assert {key: tuple(each.shape) for key, each in source.build()[2].items()} == shapes and source.shape == words


def test_without_architectures_the_causal_model_is_assumed_by_name(written):
    assert "architectures is not given: assumed BertLMHeadModel" in find(written(BERT), Options()).assumed
    assert "LlamaForCausalLM" in estimate(written(CONFIGS["llama"]), sequence=8).built_by


@pytest.mark.parametrize(("config", "options", "message"), [
    (BERT | {"architectures": ["BertModel"]}, {}, r"architectures='BertModel': how its loss is called is not known; "
     r"expected one of BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification, BertLMHeadModel"),
    (BERT | {"architectures": ["GPT2LMHeadModel"]}, {}, "architectures='GPT2LMHeadModel': .*for model_type='bert'"),
    (BERT | {"architectures": "BertForMaskedLM"}, {}, "architectures='BertForMaskedLM': expected a list of names"),
    (BERT | {"architectures": ["BertForMaskedLM", "BertModel"]}, {}, "expected the one that is to be estimated"),
    (CONFIGS["vit"], {"sequence": 8}, "sequence=8: .* names ViTForImageClassification, which takes pixel_values: lea"),
    (CONFIGS["whisper"], {"sequence": 13}, r"sequence=13: .*config\.json has a context of 12 tokens"),
    (CONFIGS["t5"], {}, "names no max_position_embeddings: give sequence"),
    ({"model_type": "vit"}, {}, "model_type='vit' has no AutoModelForCausalLM: add architectures, one of ViTForImage"),
    (CONFIGS["llama"] | {"architectures": ["LlamaForSequenceClassification"]}, {"builder": "refimpl"},
     "architectures='LlamaForSequenceClassification': our GPT is a causal language model; install transformers, or")])
def test_another_class_is_refused(written, config, options, message):
    with pytest.raises(ValueError, match=message):
        find(written(config), Options(**options))
