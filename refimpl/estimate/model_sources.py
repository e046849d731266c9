"""What MODEL names: an entry of the catalog, a `config.json` of Hugging Face, or `file.py:function`."""

from pathlib import Path

from .. import catalog
from ..model import GPTConfig
from . import hugging_face, users
from .source import of_gpt


def find(model, options):
    """Return the Source of `model`. ValueError or FileNotFoundError, which say what to give, for none."""
    text = str(model)
    if ".py:" in text or text.endswith(".py"):
        return users.source(text, options)
    if text.endswith(".json") or Path(text).is_dir():
        return hugging_face.source(text, options)
    return _of_catalog(text, options)


def _of_catalog(name, options):
    try:
        config = GPTConfig.named(name)
    except ValueError as error:
        raise ValueError(f"{error}; a config.json or file.py:function may be given, too") from error
    note = catalog.note(name)
    return of_gpt(name, config, options, [note] if note else [])
