"""Models that nobody here wrote, in tiny configurations with random weights, and batches for them.

Each function returns a function that builds: nothing is made, and no library imported, when a table of them is read.
"""

import functools
import importlib

import torch

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "max_position_embeddings": 128, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}


def later(build):
    """Decorate a function that builds, so that a call only remembers its arguments: the function it returns builds."""
    return functools.wraps(build)(lambda *args, **given: functools.partial(build, *args, **given))


@later
def hf(head, kind, attention=None, recompute=None, dtype=torch.float32, **config):
    """Transformers' `Auto{head}` for the model type `kind`. `recompute`: with gradient checkpointing, `use_reentrant`
    as given."""
    import transformers

    settings = transformers.AutoConfig.for_model(kind, **config)
    model = getattr(transformers, f"AutoModel{head}").from_config(settings, attn_implementation=attention, dtype=dtype)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model.train()


causal, seq2seq, classify = (functools.partial(hf, f"For{head}") for head in (
    "CausalLM", "Seq2SeqLM", "ImageClassification"))


def masked(kind, **config):
    return hf("ForMaskedLM", kind, **{**SMALL, **config})


@later
def classifier(name, **config):
    """Timm's model `name`, of ten classes."""
    import timm

    return timm.create_model(name, num_classes=10, **config)


@later
def vision(name, **config):
    """Timm's model `name` (or what makes one), with a cross entropy on its classes."""
    make = classifier(name) if isinstance(name, str) else functools.partial(name, num_classes=10)
    return WithLoss(make(**config)).train()


class WithLoss(torch.nn.Module):
    """A classifier that returns its loss as transformers' models do."""
    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, pixel_values, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.classifier(pixel_values), labels)}


@later
def adapted(build, method, **settings):
    """Peft's adapter `method` (the name of its configuration) around the model of `build`."""
    peft = importlib.import_module("peft")
    return peft.get_peft_model(build(), getattr(peft, method)(**settings)).train()


@later
def text(batch=8, length=64, vocabulary=256):
    tokens = torch.randint(1, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


@later
def padded(batch=8, length=64, vocabulary=256):
    """Sequences of different lengths, with their mask."""
    tokens = torch.randint(1, vocabulary, (batch, length))
    mask = (torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@later
def images(batch=4, size=32, classes=10, labels=()):
    """Images, with a class each, for each point of a map of shape `labels`, or none for None."""
    found = {"pixel_values": torch.randn(batch, 3, size, size)}
    return found if labels is None else found | {"labels": torch.randint(classes, (batch, *labels))}


@later
def pairs(batch=4, size=32, length=16):
    """Images with their captions."""
    tokens = torch.randint(1, 256, (batch, length))
    return {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, size, size), "return_loss": True}


@later
def speech(batch=4, mels=40, frames=64, length=16):
    return {"input_features": torch.randn(batch, mels, frames), "labels": torch.randint(1, 256, (batch, length))}


@later
def sound(batch=2, samples=1600, length=8):
    return {"input_values": torch.randn(batch, samples), "labels": torch.randint(1, 256, (batch, length))}
