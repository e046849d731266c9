"""Transformers' Trainer on a Llama, with its defaults."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, attn_implementation="eager"))
tokens = torch.randint(1024, (64, 128))
rows = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(folder, per_device_train_batch_size=8, use_cpu=True, report_to=[], max_steps=20,
                                 save_strategy="no", disable_tqdm=True)
    Trainer(model, settings, train_dataset=rows).train()
