"""T5 of transformers, in a loop by hand, with labels that are padded by -100."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
model = T5ForConditionalGeneration(
    T5Config(vocab_size=2048, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    inputs, labels = torch.randint(1, 2048, (8, 64)), torch.randint(1, 2048, (8, 32))
    mask = torch.ones_like(inputs)
    mask[:, 48:] = 0
    labels[:, 28:] = -100
    loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
