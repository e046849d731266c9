"""Checks that all ranks have built the same model, before it is cut: its modules, their code, its config, its values.

Ranks of several hosts may import different code, or read different weights. Cut among them, such models train as one,
without an error, and as none of them.
"""

import functools
import hashlib
import inspect
import json
import re

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .errors import CollectiveMismatch
from .texts import gather_texts, texts_if_other

OF_A_HOST = ("_name_or_path", "name_or_path", "transformers_version")  # entries of a config that may differ
OF_A_PROCESS = re.compile(r" at 0x[0-9a-f]+|\brank \d+(?: of \d+| \(\d+ of \d+ in its group\))?|\w*Communicator\(.*\)")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_model(comm, model, **also):
    """Raise CollectiveMismatch, naming the ranks and the first that differs, unless all ranks have the same model, and
    the same `also`. All ranks call it; it reads each parameter once."""
    modules, parameters = text_of(model), values_of(model)
    found = {"modules": _digest(modules), "code": code_of(model), "config": _config(model),
             "parameters": _digest(json.dumps(parameters)), **also}
    texts = texts_if_other(comm, "the model", json.dumps(found))
    if texts is None:
        return
    text, ranks = other_settings(comm, [json.loads(each) for each in texts])
    details = {f"line {number} of its text": line.strip() for number, line in enumerate(modules.splitlines(), 1)}
    details |= {f"value of {name}": value for name, value in parameters.items()}
    more = other_settings(comm, [json.loads(each) for each in gather_texts(comm, json.dumps(details))])
    raise CollectiveMismatch(f"the models differ: {'; '.join([text, *(more or ())[:1]])}. Build the same modules, by "
                             "the same code, with the same seed or weights, on every rank", ranks)


def check_settings(comm, settings, before="", common=False):
    """Raise CollectiveMismatch if a setting is not the same on all ranks; from {name: value} of each. `common`: of
    those that all have, as a stage of a pipeline may lack another's param group."""
    names = set.intersection(*map(set, settings)) if common else set().union(*settings)
    if other := other_settings(comm, [{name: each[name] for name in each if name in names} for each in settings]):
        raise CollectiveMismatch(f"{before}{other[0]}. Each would train another model: give every rank the same",
                                 other[1])


def other_settings(comm, settings):
    """Return (text, ranks that differ) of the first setting that is not the same on all ranks, or None. `settings`:
    {name: value} of each rank."""
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [each.get(name) for each in settings]
        if differ := comm.differing(values):
            told = "; ".join(f"rank {rank}: {value}" for rank, value in zip(comm.ranks, values, strict=True))
            return f"ranks {differ} have another {name} than rank {comm.ranks[0]}: {told}", differ
    return None


def text_of(model):
    """Return a model's modules as text, without what is of this process alone, an address or the rank's number."""
    return OF_A_PROCESS.sub("", repr(model))


def code_of(model):
    """Return a hash of the code of a model's classes, but for torch's own."""
    kinds = {type(module) for module in model.modules()}
    parts = [each for kind in kinds if not kind.__module__.startswith("torch.") for each in (kind, kind.forward)]
    return _digest("".join(sorted(map(_source, parts))))  # a forward may be another's, given to the class later


@functools.cache
def _source(part):
    try:
        return f"{part.__qualname__}\n{inspect.getsource(part)}"
    except (OSError, TypeError, AttributeError):  # made by a call, or typed in
        return getattr(part, "__qualname__", "")


def _config(model):
    config = getattr(model, "config", None)
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if name not in OF_A_HOST}
    return _digest(OF_A_PROCESS.sub("", str(given)))


@torch.no_grad()
def values_of(model):
    """Return {name: its shape, its dtype and two sums of its bits}; on the meta device, or of fake tensors, no sums."""
    found = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        bits = x.detach().view(INTEGERS[x.itemsize]) if x.itemsize in INTEGERS else x.detach().view(torch.int64)
        known = x.device.type != "meta" and not isinstance(x, FakeTensor)
        sums = [each.sum(dtype=torch.int64).item() for each in (bits, bits.reshape(-1)[::2])] if known else []
        found[name] = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {sums}"
    return found


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:8]
