"""Training steps whose traces are planned: our GPT, a Llama of transformers, a ConvNeXt of timm."""

import torch

from refimpl import memory
from refimpl.allocator import AllocationTrace
from refimpl.model import GPT, GPTConfig


def _gpt(layers):
    model = GPT(GPTConfig(vocab_size=1000, context_length=128, layers=layers, hidden=128, heads=4))
    tokens = torch.zeros((4, 128), dtype=torch.int64)
    return model, lambda: model(tokens, tokens)


def _llama():
    import outside  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                                         num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.zeros((4, 128), dtype=torch.int64)
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def _convnext():
    import outside  # noqa: F401
    import timm
    model, images = timm.create_model("convnext_tiny", num_classes=10), torch.zeros(8, 3, 96, 96)
    return model, lambda: model(images).square().sum()


MODELS = {"our GPT, 4 layers": lambda: _gpt(4), "our GPT, 12 layers": lambda: _gpt(12),
          "transformers' Llama": _llama, "timm's ConvNeXt": _convnext}


def trace_of(name, steps=2):
    """Return the AllocationTrace of a model and its training steps with AdamW."""

    def train():
        model, loss = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    return AllocationTrace.of(memory.dry_run(train))


def trainer(name, *, batch=4, options=None, **config):
    """Return (model, step, inputs): `step(*inputs())` trains a model on a batch and returns its loss. `options` are of
    AdamW."""
    torch.manual_seed(0)
    if name != "gpt":
        import outside  # noqa: F401
    if name == "gpt":
        model = GPT(GPTConfig(**{"vocab_size": 200, "context_length": 32, "layers": 2, "hidden": 32, "heads": 4,
                                 **config}))
        inputs, loss_of = (lambda rows=batch: (torch.randint(200, (rows, 32)),)), (lambda t: model(t, t))
    elif name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2))
        inputs = lambda rows=batch: (torch.randint(200, (rows, 32)),)  # noqa: E731
        loss_of = lambda t: model(input_ids=t, labels=t).loss  # noqa: E731
    else:
        import timm
        model = timm.create_model("convnext_atto", num_classes=10)
        inputs, loss_of = (lambda rows=batch: (torch.randn(rows, 3, 32, 32),)), (lambda x: model(x).square().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **(options or {}))

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
    """Two equal trainers after a step each, and a batch."""
    (model, step, inputs), (other, plain, _) = trainer(name, **config), trainer(name, **config)
    batch = inputs()
    torch.manual_seed(1)
    step(*batch)
    torch.manual_seed(1)
    plain(*batch)
    return model, step, other, plain, inputs


def both(seed, run, plain, batch):
    """Run two steps from the same random state: (Execution, loss of the plain one)."""
    torch.manual_seed(seed)
    found = run(*batch)
    torch.manual_seed(seed)
    return found, plain(*batch)
