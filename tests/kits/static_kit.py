"""Training steps whose traces are planned: our GPT, a Llama of transformers, a ConvNeXt of timm."""

from functools import partial

import numpy as np
import torch

from refimpl import memory
from refimpl.allocator import AllocationTrace
from refimpl.allocator.static import Lifetimes
from refimpl.model import GPT, GPTConfig


def gpt(**config):
    """(model, function that returns its loss of a batch), as of the others below."""
    model = GPT(GPTConfig(**config))
    return model, lambda tokens: model(tokens, tokens)


def llama(vocabulary, width, layers):
    import outside  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2))
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


def convnext(name):
    import outside  # noqa: F401
    import timm
    model = timm.create_model(name, num_classes=10)
    return model, lambda images: model(images).square().mean()


WIDE = {"vocab_size": 1000, "context_length": 128, "hidden": 128, "heads": 4}
MODELS = {"our GPT, 4 layers": partial(gpt, **WIDE, layers=4), "our GPT, 12 layers": partial(gpt, **WIDE, layers=12),
          "transformers' Llama": partial(llama, 1000, 128, 4), "timm's ConvNeXt": partial(convnext, "convnext_tiny")}


def trace_of(name):
    """Return the AllocationTrace of a model and its two training steps with AdamW."""
    def train():
        model, loss_of = MODELS[name]()
        batch = torch.zeros(8, 3, 96, 96) if "timm" in name else torch.zeros((4, 128), dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return AllocationTrace.of(memory.dry_run(train))


def lifetimes_of(boxes):
    """Of (begin, length, size)."""
    return Lifetimes([b for b, _, _ in boxes], [b + w for b, w, _ in boxes], [n for _, _, n in boxes])


def shorter(lifetimes, least=0):
    """The mutant: each lifetime ends one event too early."""
    return Lifetimes(lifetimes.begins, np.maximum(lifetimes.begins + least, lifetimes.ends - 1), lifetimes.nbytes)


def trainer(name, *, options=None, **config):
    """Return (model, step, inputs): `step(*inputs())` trains a model on a batch and returns its loss. `options` are of
    AdamW."""
    torch.manual_seed(0)
    small = {"vocab_size": 200, "context_length": 32, "layers": 2, "hidden": 32, "heads": 4}
    model, loss_of = {"gpt": partial(gpt, **small | config), "llama": partial(llama, 200, 32, 2),
                      "convnext": partial(convnext, "convnext_atto")}[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **(options or {}))
    def inputs(rows=4):
        return (torch.randn(rows, 3, 32, 32) if name == "convnext" else torch.randint(200, (rows, 32)),)
    def step(*batch):
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return model, step, inputs


def same(a, b):
    """Whether two models have the same parameters and gradients, to the bit."""
    return all(torch.equal(x, y) and (x.grad is y.grad or torch.equal(x.grad, y.grad))
               for x, y in zip(a.parameters(), b.parameters(), strict=True))


def pair(name="gpt", **config):
    """Two equal trainers after a step each, and what makes a batch."""
    (model, step, inputs), (other, plain, _) = trainer(name, **config), trainer(name, **config)
    both(1, step, plain, inputs())
    return model, step, other, plain, inputs


def both(seed, run, plain, batch):
    """Run two steps from the same random state: (Execution, loss of the plain one)."""
    torch.manual_seed(seed)
    found = run(*batch)
    torch.manual_seed(seed)
    return found, plain(*batch)
