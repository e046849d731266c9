"""How a model is made, and the batch that it is called with."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ..model import GPT, softmax_attention

ATTENTIONS = {"sdpa": F.scaled_dot_product_attention, "eager": softmax_attention}


@dataclass
class Source:
    """How a model is made. `build()` returns (model, args, kwargs of a call that gives its loss), in torch's default
    dtype. `built_by`: whose code that is. `assumed`: sentences about what was not said, or is not built. `shape`: batch
    and tokens, in words."""

    name: str
    built_by: str
    build: object
    shape: str
    assumed: list = field(default_factory=list)


def of_gpt(name, config, options, assumed):
    """Return the Source of our GPT of a config."""
    length = tokens_of(options, config.context_length, name)

    def build():
        model = GPT(config, ATTENTIONS[options.attention or "sdpa"])
        return model, tuple(tokens(options.batch, length) for _ in range(2)), {}

    return Source(name, "refimpl's GPT", build, words(options, length), assumed)


def tokens_of(options, context, name):
    """Return the tokens of a sequence. ValueError for more than the model has positions for."""
    if options.sequence is not None and context is not None and options.sequence > context:
        raise ValueError(f"sequence={options.sequence}: {name} has a context of {context} tokens; give that many or "
                         "less")
    return options.sequence or context


def tokens(batch, length):
    """Return (B, T) ids."""
    return torch.zeros(batch, length, dtype=torch.int64)


def words(options, length):
    """Say the shape of a batch."""
    return f"{options.batch} × {length} tokens"
