"""What tests of `paper.py` share: models to hold it to its hardened version on, our GPT and transformers' LLaMA."""

import torch
from outside.models import GROUPED, causal
from torch import nn
from torch.nn import functional as F

from refimpl.model import GPT, GPTConfig

TINY = {"vocab_size": 256, "context_length": 64, "layers": 2, "hidden": 64, "heads": 4}


class Llama(nn.Module):
    """transformers' LLaMA as our GPT is called: `model(tokens, targets)` is the mean loss of the targets."""
    def __init__(self):
        super().__init__()
        self.inner = causal("llama", **GROUPED)()

    def forward(self, tokens_BT, targets_BT):
        logits_BTV = self.inner(input_ids=tokens_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def gpt(**changes):
    """Build the tiny GPT."""
    return GPT(GPTConfig(**TINY | changes))


MODELS = {"gpt": gpt, "llama": Llama}


def built(name, dtype=None, batch=8, length=32):
    """Return (model, tokens, targets) of `MODELS[name]`, the same each time; some targets are −100."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype or torch.float32)
    tokens_BT, targets_BT = torch.randint(1, 256, (2, batch, length))
    targets_BT[: batch // 3, 5:] = -100
    return model, tokens_BT, targets_BT


def gradients(model):
    """Take the gradients of a model away from it, as a list."""
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(some, others):
    """Tell whether two lists of tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
