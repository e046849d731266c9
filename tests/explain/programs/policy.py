"""GRPO in small: several answers to a prompt, advantages by group, a frozen reference model."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
policy = GPT2LMHeadModel(config).train()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)


def log_probabilities(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None])[..., 0]


for _ in range(5):
    tokens, rewards = torch.randint(512, (8, 64)), torch.rand(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()[:, None]
    with torch.no_grad():
        base = log_probabilities(reference, tokens)
    new = log_probabilities(policy, tokens)
    apart = (base - new).exp() - (base - new) - 1
    (-(new - new.detach()).exp() * advantages + 0.04 * apart).mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
