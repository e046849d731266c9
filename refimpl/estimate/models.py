"""What MODEL names: an entry of the catalog, a `config.json` of Hugging Face, or `file.py:function`."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional as F

from .. import catalog
from ..model import GPT, GPTConfig, softmax_attention

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


def find(model, options):
    """Return the Source of `model`. ValueError or FileNotFoundError, which say what to give, for none."""
    text = str(model)
    if ".py:" in text or text.endswith(".py"):
        from .users import source
    elif text.endswith(".json") or Path(text).is_dir():
        from .hugging_face import source
    else:
        source = _of_catalog
    return source(text, options)


def _of_catalog(name, options):
    try:
        config = GPTConfig.named(name)
    except ValueError as error:
        raise ValueError(f"{error}; a config.json or file.py:function may be given, too") from error
    note = catalog.note(name)
    return of_gpt(name, config, options, [note] if note else [])


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
