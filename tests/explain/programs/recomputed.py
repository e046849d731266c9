"""GPT-2 as its owner already made it thrifty: checkpointed blocks, and gradients of two batches a step."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=512, n_embd=128, n_layer=3, n_head=4, n_positions=128, use_cache=True,
                    attn_implementation="eager")  # its hidden layer is as wide as its vocabulary
model = GPT2LMHeadModel(config).train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    for _ in range(2):
        tokens = torch.randint(512, (8, 128))
        (model(input_ids=tokens, labels=tokens).loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
