"""Models that nobody here wrote, in tiny configurations with random weights, and batches for them.

Each function returns a function that builds: nothing is made when a table of them is read.
"""

import importlib
from functools import partial

import timm
import torch
import transformers

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "max_position_embeddings": 128, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}


def hf(head, kind, attention=None, recompute=None, dtype=torch.float32, **config):
    """Return a builder of transformers' `Auto{head}` for the model type `kind`. `recompute`: with gradient
    checkpointing, `use_reentrant` as given."""

    def build():
        settings = transformers.AutoConfig.for_model(kind, **config)
        auto = getattr(transformers, f"AutoModel{head}")
        model = auto.from_config(settings, attn_implementation=attention, dtype=dtype)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})
        return model.train()

    return build


def causal(kind, **config):
    """Return a builder of a decoder with a language model's head."""
    return hf("ForCausalLM", kind, **config)


def masked(kind, **config):
    """Return a builder of an encoder with a masked language model's head."""
    return hf("ForMaskedLM", kind, **{**SMALL, **config})


def seq2seq(kind, **config):
    """Return a builder of an encoder and a decoder."""
    return hf("ForSeq2SeqLM", kind, **config)


def vision(name, **config):
    """Return a builder of timm's model `name` (or a class of its), with a cross entropy on its classes."""
    make = partial(timm.create_model, name) if isinstance(name, str) else name
    return lambda: WithLoss(make(num_classes=10, **config)).train()


class WithLoss(torch.nn.Module):
    """A classifier that returns its loss as transformers' models do."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, pixel_values, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.classifier(pixel_values), labels)}


def adapted(build, method, **settings):
    """Return a builder of peft's adapter `method` (the name of its configuration) around the model of `build`."""

    def wrap():
        peft = importlib.import_module("peft")
        return peft.get_peft_model(build(), getattr(peft, method)(**settings)).train()

    return wrap


# --- batches ---------------------------------------------------------------------------------------------------------


def text(batch=8, length=64, vocabulary=256):
    """Return a maker of tokens to continue."""

    def make():
        tokens = torch.randint(1, vocabulary, (batch, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def padded(batch=8, length=64, vocabulary=256):
    """Return a maker of sequences of different lengths, with their mask."""

    def make():
        tokens = torch.randint(1, vocabulary, (batch, length))
        mask = (torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]).long()
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    return make


def images(batch=4, size=32, classes=10, labels=()):
    """Return a maker of images, with a class each, for each point of a map of shape `labels`, or none for None."""

    def make():
        if labels is None:
            return {"pixel_values": torch.randn(batch, 3, size, size)}
        return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(classes, (batch, *labels))}

    return make


def pairs(batch=4, size=32, length=16):
    """Return a maker of images with their captions."""

    def make():
        tokens = torch.randint(1, 256, (batch, length))
        return {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, size, size), "return_loss": True}

    return make


def speech(batch=4, mels=40, frames=64, length=16):
    """Return a maker of spectrograms with what was said."""

    def make():
        return {"input_features": torch.randn(batch, mels, frames), "labels": torch.randint(1, 256, (batch, length))}

    return make


def sound(batch=2, samples=1600, length=8):
    """Return a maker of waveforms with what was said."""

    def make():
        return {"input_values": torch.randn(batch, samples), "labels": torch.randint(1, 256, (batch, length))}

    return make
