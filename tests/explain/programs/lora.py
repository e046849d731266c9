"""A LoRA of peft on a frozen Llama."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=1024, hidden_size=192, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=128)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for _ in range(10):
    tokens = torch.randint(1024, (4, 128))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
