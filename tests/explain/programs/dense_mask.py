"""unsloth#6738: packed rows without a varlen kernel get a dense (sum L, sum L) mask: more than the padding it saved."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lengths = [256] * 8
for _ in range(10):
    tokens = torch.randint(256, (1, sum(lengths)))
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = (document[:, None] == document[None]).tril()
    mask = torch.zeros(same.shape).masked_fill(~same, float("-inf"))[None, None]
    model(input_ids=tokens, position_ids=position, attention_mask=mask, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
