"""A training step of our GPT, which closed forms and answers are held against, on real tensors or on fake ones."""

from contextlib import nullcontext

import torch
from torch.nn import functional as F

from refimpl.checkpointing import recompute
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor

ATTENTIONS = {"dense": softmax_attention, "flash": F.scaled_dot_product_attention}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
              "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9)}


def train(config, batch, sequence, dtype=torch.float32, optimizer="adamw", *, attention="dense", recompute_blocks=False,
          chunk_size=None, gradient="full"):
    """Make a step as in a loop, in which the optimizer's states and the last loss exist already."""
    model = GPT(config, ATTENTIONS[attention], dtype=dtype)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    call = model if chunk_size is None else ChunkedSequenceProcessor(model, chunk_size, gradient=gradient)
    tokens, targets = (torch.zeros(batch, sequence, dtype=torch.int64) for _ in range(2))
    with recompute(model.blocks) if recompute_blocks else nullcontext():
        loss = torch.zeros(())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stepping.step()
        stepping.zero_grad()
        loss = call(tokens, targets)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
