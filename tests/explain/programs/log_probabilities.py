"""OpenRLHF#718: log_softmax over a whole vocabulary, of which one number a token is used."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
V = 16384
actor = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
)
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)


def log_probs(logits, tokens):
    return torch.nn.functional.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]


for _ in range(10):
    tokens = torch.randint(V, (4, 128))
    advantage, old = torch.randn(4, 127), torch.randn(4, 127) - 9.7
    new = log_probs(actor(input_ids=tokens).logits[:, :-1], tokens[:, 1:])
    ratio = (new - old).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
