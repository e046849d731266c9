"""Accelerate's loop around a classifier of sentences, BERT."""

import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
                    attn_implementation="eager")
accelerator = Accelerator(cpu=True)
model = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader([{"input_ids": torch.randint(512, (128,)), "labels": i % 2} for i in range(64)],
                                     batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
