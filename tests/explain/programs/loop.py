"""A plain loop: GPT-2 of transformers, AdamW, some epochs of random tokens."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
for name, default in (("--micro-batches", 1), ("--rows", 8), ("--tokens", 128)):
    parser.add_argument(name, type=int, default=default)
options = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(vocab_size=2048, n_embd=128, n_layer=2, n_head=4, n_positions=128, attn_implementation="eager")
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(2048, (64, options.tokens))), batch_size=options.rows)
for _ in range(3):
    for (tokens,) in loader:
        for part in tokens.chunk(options.micro_batches):
            loss = model(input_ids=part, labels=part).loss / options.micro_batches
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
print("trained to the end")
