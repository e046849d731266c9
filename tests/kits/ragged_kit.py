"""What tests of accumulation share: a GPT in one dtype to the end, and batches whose rows have many targets or none."""

import torch
from torch.nn import functional as F

from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=61, context_length=16, layers=2, hidden=16, heads=2)
LENGTHS = [16, 2, 9, 5, 0, 0, 1, 12, 3]  # targets of each row
ROWS = {1: [slice(0, 9)], 2: [slice(0, 6), slice(6, 9)], 3: [slice(0, 4), slice(4, 6), slice(6, 9)]}  # 1 of 3 has none


class Net(GPT):
    """Its loss is in the dtype of the model: our GPT takes the logits of its loss to fp32."""

    def __init__(self, dtype=torch.float64, config=CONFIG):
        torch.manual_seed(0)
        super().__init__(config, dtype=dtype)

    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ragged(tokens, targets, lengths):
    """A batch of which each row has its own number of targets."""
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return tokens, targets


def batch(step=0):
    tokens, targets = torch.randint(0, 61, (2, len(LENGTHS), 16), generator=torch.Generator().manual_seed(step))
    return ragged(tokens, targets, LENGTHS)


def mine(comm, step=0):
    """This rank's rows of a batch."""
    return [each[ROWS[comm.world_size][comm.rank]] for each in batch(step)]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def whole(model, *batch, loss_fn=None):
    """(loss, gradients) of the batch in one piece; `.grad` is None again."""
    loss = loss_fn(model, *batch) if loss_fn else model(*batch)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), found
