"""Direct preference optimization: a policy and a frozen reference, on chosen and rejected answers in one batch."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
policy = GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_positions=64, n_embd=64, n_layer=2, n_head=4))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)


def log_prob(model, tokens):
    logits = model(tokens).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None]).squeeze(2).sum(1)


for _ in range(4):
    tokens = torch.randint(1024, (8, 64))  # four chosen, four rejected
    ours = log_prob(policy, tokens)
    with torch.no_grad():
        theirs = log_prob(reference, tokens)
    better, worse = (ours - theirs).chunk(2)
    loss = -torch.nn.functional.logsigmoid(0.1 * (better - worse)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
