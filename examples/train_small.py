"""A training loop as people write them: a small GPT, AdamW, random tokens. `refimpl explain examples/train_small.py`"""

import argparse

import torch

from refimpl.model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=4096, context_length=256, layers=4, hidden=192, heads=6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(options.steps):
    tokens = torch.randint(4096, (options.rows, 257))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
