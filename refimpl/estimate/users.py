"""A model of the user's: `file.py:function`, a function that returns a model, or a model and its batch."""

import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ..memory.fakes.program_lines import of_the_program, raised
from ..model import GPT
from .source import Source, tokens, tokens_of, words


def source(text, options):
    """Return the Source of `file.py:function`. FileNotFoundError and ValueError say what to give instead."""
    file, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected file.py:function, a function that returns a model, or "
                                "(model, batch)")
    if not name:
        raise ValueError(f"{path}: expected the function, too: {path}:build")
    if options.attention is not None:
        raise ValueError(f"attention={options.attention!r} of a model that {text} builds: set it there")
    functions, bound = _names(path)  # so that nothing is imported for a name that is not there
    function = getattr(_module(path), name, None) if bound is None or name in bound else None
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    taken = inspect.signature(function).parameters
    given = {key: value for key, value in (("batch", options.batch), ("sequence", options.sequence)) if key in taken}
    needed = [key for key, each in taken.items() if each.default is each.empty and key not in given
              and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if needed:
        raise ValueError(f"{text} needs {', '.join(needed)}: expected a function of batch and sequence, or of nothing; "
                         "give the others a default")

    def build():
        return _model_and_batch(function(**{k: v for k, v in given.items() if v is not None}), text, options)

    shape = ", ".join(f"{key} {value}" for key, value in given.items()) or "as the function makes it, or its context"
    return Source(text, path.name, build, words(options, options.sequence) if options.sequence else shape)


def _module(path):
    """Import a file, once, its folder being one that it can import from."""
    name = f"refimpl_estimate_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{of_the_program(raised(error))}: {path} raises {type(error).__name__} when it is imported: "
                         f"{error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _names(path):
    """Return (functions that a file defines, all names that it binds), as its text says. The second is None if the text
    does not say all. ValueError for no Python."""
    try:
        code = path.read_text()
        table = symtable.symtable(code, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python: {error}") from error
    symbols = table.get_symbols()
    functions = [each.get_name() for each in symbols if each.is_namespace() and any(
        place.get_type() == "function" for place in each.get_namespaces())]
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported() or each.is_namespace()}
    return functions, None if re.search(r"import \*|\bglobals\(", code) else bound


def _model_and_batch(returned, text, options):
    """Return (model, args, kwargs) of what a function returned."""
    model, *batch = returned if isinstance(returned, (tuple, list)) else (returned,)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{text} returned a {type(model).__name__}: expected a torch.nn.Module, or (model, batch)")
    if batch:
        batch = batch[0] if len(batch) == 1 else tuple(batch)
        if isinstance(batch, Mapping):
            return model, (), dict(batch)
        return model, (batch if isinstance(batch, (tuple, list)) else (batch,)), {}
    config = getattr(model, "config", None)
    if isinstance(model, GPT):
        length = tokens_of(options, config.context_length, text)
        return model, (tokens(options.batch, length), tokens(options.batch, length)), {}
    if hasattr(config, "get_text_config") and hasattr(model, "get_output_embeddings"):
        length = tokens_of(options, getattr(config.get_text_config(), "max_position_embeddings", None), text)
        if length is not None:
            return model, (), {key: tokens(options.batch, length) for key in ("input_ids", "labels")}
    raise ValueError(f"{text} returned a {type(model).__name__} alone, and what it is called with is not known: return "
                     "(model, batch), the batch as a dict of arguments or a tuple")
