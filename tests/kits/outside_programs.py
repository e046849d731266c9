"""Training programs on models that nobody here wrote: transformers, timm and peft, their own loops, tiny and random.

`PROGRAMS[name]()` seeds, builds and returns a Program: `step()` runs one whole training step and returns tensors that
are equal to the bit in another build; `objects` is for `memory.track(*objects)`, and the same step on fake copies is
`memory.dry_run(function, *given)`.
"""

import torch
from outside import loops, models
from outside.loops import adafactor, for_loop, foreach, fused, momentum, plain, trained
from outside.models import GROUPED, SMALL, adapted, causal, classify, hf, images, masked, padded, seq2seq, text, vision
from torch.autograd.graph import save_on_cpu

GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TRANSLATOR = {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 0,
              "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}
DEEPSEEK = {**GROUPED, "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 32,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
REFORMER = {"attention_head_size": 16, "feed_forward_size": 128, "attn_layers": ["local", "lsh"], "is_decoder": False,
            "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48], "lsh_attn_chunk_length": 16, "num_buckets": 8,
            "local_attn_chunk_length": 16, "hash_seed": 0, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
            "lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}  # its own seeds
WAV2VEC2 = {**SMALL, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_length": 2}
CONVNEXT = {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "num_labels": 10}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.1}
PICTURE = {"image_size": 32, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 128, "num_labels": 10}
WHISPER = hf("ForSpeechSeq2Seq", "whisper", num_mel_bins=40, max_source_positions=64, max_target_positions=32,
             **TRANSLATOR)


def mixer(**config):
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(**config)


PROGRAMS = {
    # decoders
    "gpt2": plain(causal("gpt2", **GPT2), text()),
    "gpt2, eager attention": plain(causal("gpt2", attention="eager", **GPT2), text()),
    "gpt2, clipped": plain(causal("gpt2", **GPT2), text(), foreach, clip=1.0),
    "gpt2, two micro-batches": plain(causal("gpt2", **GPT2), text(4), for_loop, micro_batches=2, clip=1.0),
    "gpt2, autocast": plain(causal("gpt2", **GPT2), text(), fused, autocast=True),
    "llama": plain(causal("llama", **GROUPED), text(), fused),
    "llama, eager attention": plain(causal("llama", attention="eager", **GROUPED), text()),
    "llama, padded": plain(causal("llama", attention="sdpa", **GROUPED), padded()),
    "llama, bf16": plain(causal("llama", dtype=torch.bfloat16, **GROUPED), text(), foreach, clip=1.0),
    "mistral, sliding window": plain(causal("mistral", sliding_window=16, **GROUPED), text(), momentum),
    "qwen2": plain(causal("qwen2", tie_word_embeddings=True, **GROUPED), text(), foreach),
    "qwen3": plain(causal("qwen3", **GROUPED), text(), loops.muon),
    "gemma2": plain(causal("gemma2", attention="eager", query_pre_attn_scalar=16, **GROUPED), text()),
    "opt": plain(causal("opt", ffn_dim=128, word_embed_proj_dim=64, **SMALL), text(), adafactor),
    "falcon": plain(causal("falcon", **SMALL), text()), "phi": plain(causal("phi", **SMALL), text()),
    "gpt-neox": plain(causal("gpt_neox", **SMALL), text()),
    "bloom, an autograd.Function": plain(causal("bloom", vocab_size=256, hidden_size=64, n_layer=2, n_head=4), text()),
    "gpt2, recomputed": plain(causal("gpt2", recompute=False, **GPT2), text()),
    "gpt2, recomputed, reentrant": plain(causal("gpt2", recompute=True, **GPT2), text()),
    "llama, recomputed": plain(causal("llama", recompute=False, **GROUPED), text(), fused, micro_batches=2),
    "llama, recomputed, reentrant": plain(causal("llama", recompute=True, **GROUPED), text()),
    "bert, recomputed, autocast": plain(masked("bert", recompute=False), text(), autocast=True),
    "t5, recomputed": plain(seq2seq("t5", recompute=False, **T5), text(4)),
    # encoders
    "bert": plain(masked("bert"), padded()),
    "bert, LBFGS": loops.with_closure(masked("bert", hidden_dropout_prob=0, attention_probs_dropout_prob=0), text(4)),
    "roberta, autocast": plain(masked("roberta"), padded(), autocast=True, clip=1.0),
    "deberta-v2": plain(masked("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]), padded(4, 32)),
    "modernbert": plain(masked("modernbert", global_attn_every_n_layers=2, local_attention=16), padded()),
    "electra": plain(masked("electra", embedding_size=32), padded(), fused),
    "albert": plain(masked("albert", embedding_size=32), text()),
    "fnet, complex numbers": plain(masked("fnet"), text(), clip=1.0),
    "longformer": plain(masked("longformer", attention_window=[16, 16]), padded()),
    "reformer, reversible": plain(masked("reformer", **REFORMER), text()),
    "wav2vec2": plain(hf("ForCTC", "wav2vec2", **WAV2VEC2), models.sound()),
    "distilbert": plain(masked("distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128), padded(), for_loop),
    # encoders with decoders
    "t5": plain(seq2seq("t5", **T5), text(4), adafactor), "bart": plain(seq2seq("bart", **TRANSLATOR), text(4)),
    "marian": plain(seq2seq("marian", **TRANSLATOR), text(4), foreach),
    "whisper": plain(WHISPER, models.speech(frames=128)),
    # mixtures of experts
    "mixtral, a loop over experts": plain(causal("mixtral", experts_implementation="eager", **EXPERTS), text()),
    "mixtral, grouped experts": plain(causal("mixtral", experts_implementation="grouped_mm", **EXPERTS), text()),
    "mixtral, batched experts": plain(causal("mixtral", experts_implementation="batched_mm", **EXPERTS), text(2, 16)),
    "qwen2-moe": plain(causal("qwen2_moe", shared_expert_intermediate_size=64, **EXPERTS), text()),
    "switch transformer": plain(seq2seq("switch_transformers", num_experts=4, expert_capacity=16, **T5), text(2, 32)),
    "gpt-oss": plain(causal("gpt_oss", **EXPERTS), text(4)),
    "deepseek-v3": plain(causal("deepseek_v3", **DEEPSEEK), text(4)),
    # state spaces
    "mamba": plain(causal("mamba", vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=8), text(4, 32)),
    "mamba2": plain(causal("mamba2", vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=16, num_heads=4,
                           head_dim=16, n_groups=1, chunk_size=16), text(4, 32)),
    "qwen3-next": plain(causal("qwen3_next", layer_types=["linear_attention", "full_attention"],
                               linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                               linear_value_head_dim=16, shared_expert_intermediate_size=64, **EXPERTS), text(4)),
    "jamba": plain(causal("jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                          expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False, **EXPERTS), text(4, 32)),
    "recurrent-gemma": plain(causal("recurrent_gemma", lru_width=64, attention_window_size=32, use_cache=False,
                                    **GROUPED), text(4, 32)),
    "rwkv": plain(causal("rwkv", vocab_size=256, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32,
                         context_length=32), text(4, 32)),
    # vision
    "vit": plain(classify("vit", **PICTURE), images(8), fused),
    "vit, autocast": plain(classify("vit", **PICTURE), images(8), autocast=True, clip=1.0),
    "swin": plain(classify("swin", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                             window_size=4, num_labels=10), images(8)),
    "convnext": plain(classify("convnext", **CONVNEXT), images(8, 64), momentum),
    "segformer": plain(hf("ForSemanticSegmentation", "segformer", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 32, 64],
                          decoder_hidden_size=32, num_labels=10), images(2, 64, labels=(64, 64))),
    "dinov2": plain(classify("dinov2", drop_path_rate=0.1, **PICTURE), images(8), autocast=True),
    "vit-mae": plain(hf("ForPreTraining", "vit_mae", decoder_hidden_size=32, decoder_num_hidden_layers=1,
                        decoder_num_attention_heads=4, decoder_intermediate_size=64, **PICTURE),
                     images(8, labels=None)),
    "clip": plain(hf("", "clip", text_config={**SMALL, "bos_token_id": 1, "eos_token_id": 2}, vision_config=PICTURE,
                     projection_dim=32), models.pairs()),
    "timm: resnet": plain(vision("resnet10t", channels=(16, 32, 64, 128)), images(8), momentum),
    "timm: convnext": plain(vision("convnext_atto", dims=(16, 32, 64, 128), depths=(1, 1, 2, 1)), images(8, 64)),
    "timm: mixer": plain(vision(mixer, img_size=32, patch_size=4, embed_dim=64, num_blocks=2), images(16), fused),
    "timm: vit": plain(vision("vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=64, depth=2, num_heads=4,
                              drop_rate=0.1, drop_path_rate=0.1), images(16), clip=1.0),
    "timm: efficientnet": plain(vision("test_efficientnet"), images(8, 64), foreach),
    "timm: mobilenetv3": plain(vision("mobilenetv3_small_050"), images(4, 64), autocast=True),
    "timm: swin": plain(vision("swin_tiny_patch4_window7_224", img_size=32, patch_size=2, embed_dim=16, depths=(2, 2),
                               num_heads=(2, 4), window_size=4), images(8)),
    "timm: mambaout": plain(vision("test_mambaout"), images(8, 64)),
    # adapters
    "LoRA on gpt2": plain(adapted(causal("gpt2", **GPT2), "LoraConfig", target_modules=["c_attn"],
                                  fan_in_fan_out=True, **LORA), text()),
    "LoRA on llama, recomputed": plain(adapted(causal("llama", recompute=False, **GROUPED), "LoraConfig", **LORA),
                                       text(), fused),
    "DoRA on llama": plain(adapted(causal("llama", **GROUPED), "LoraConfig", use_dora=True, **LORA), text()),
    "IA3 on llama": plain(adapted(causal("llama", **GROUPED), "IA3Config", task_type="CAUSAL_LM"), text()),
    "prompt tuning of gpt2": plain(adapted(causal("gpt2", **GPT2), "PromptTuningConfig", task_type="CAUSAL_LM",
                                           num_virtual_tokens=8), text()),
    # other loops
    "Trainer, gpt2": trained(causal("gpt2", **GPT2), text()),
    "Trainer, bert, bf16, accumulating": trained(masked("bert"), text(), bf16=True, gradient_accumulation_steps=2),
    "Trainer, llama, recomputing": trained(causal("llama", **GROUPED), text(), gradient_checkpointing=True),
    "Trainer, its own optimizer": trained(causal("qwen2", **GROUPED), text(), optimizer=None, optim="adafactor"),
    "Accelerate, llama": loops.accelerated(causal("llama", **GROUPED), text(4)),
    "Accelerate, vit": loops.accelerated(classify("vit", **PICTURE), images(8), fused),
    "llama, stepping in backward": loops.stepping_in_backward(causal("llama", **GROUPED), text()),
    "gpt2, under save_on_cpu": plain(causal("gpt2", **GPT2), text(), around=save_on_cpu),
    "vit, gradient penalty": loops.with_penalty(classify("vit", attention="eager", **PICTURE), images()),
    "convnext, moving average": loops.averaged(classify("convnext", **CONVNEXT), images(8, 64))}
