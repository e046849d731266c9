"""What form a manifest and a state_dict have, and a check that names the first field of another form.

A form is one of

    Leaf("a string", test)            a value that passes the test
    [form]                            a list or tuple of values of that form
    Each(form, {"key": form})         a dict of any names, with values of that form, but for the keys that it must have
    {"key": form, "other?": form}     a dict with exactly these keys; those with a "?" may be absent

What is read from a file may be anything: a check is here so that the code after it need not ask.
"""

import reprlib
from typing import Any, NamedTuple

import torch

from .dtype_names import DTYPES

LARGEST = 2**62  # of a count: sums of two are still int64


class Leaf(NamedTuple):
    """A value that passes a test; `says` is what an error expects."""

    says: str
    fits: Any


class Each(NamedTuple):
    """A dict of any names, with values of `form`; those in `required` are there, with their own form."""

    form: Any
    required: Any = {}


def mismatch(value, form, place=""):
    """Return a sentence on the first part of `value` that is not of `form`; None if all is."""
    if isinstance(form, Leaf):
        return None if form.fits(value) else f"{place or 'it'} is {reprlib.repr(value)}: expected {form.says}"
    if isinstance(form, list):
        if not isinstance(value, (list, tuple)):
            return f"{place or 'it'} is {reprlib.repr(value)}: expected a list"
        parts = [(each, form[0], f"{place}[{i}]") for i, each in enumerate(value)]
    else:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return f"{place or 'it'} is {reprlib.repr(value)}: expected a dict of names"
        before = f"{place}." if place else ""
        required = form.required if isinstance(form, Each) else form
        known = dict.fromkeys(value, form.form) if isinstance(form, Each) else {}
        known |= {key.rstrip("?"): each for key, each in required.items()}
        if wrong := [key for key in value if key not in known]:
            return f"{before}{wrong[0]} is there: expected {', '.join(known)} alone"
        if missing := [key for key in required if key[-1] != "?" and key not in value]:
            return f"{place or 'it'} has no {missing[0].rstrip('?')!r}"
        parts = [(each, known[key], f"{before}{key}") for key, each in value.items()]
    return next(filter(None, (mismatch(*part) for part in parts)), None)


def is_number(value):
    """Tell whether this is an int or a float that a tensor can hold. A bool is none."""
    return type(value) is float or type(value) is int and abs(value) < 2**63


def is_plain(value, deep=4):
    """Tell whether this is what a hyper-parameter can be: None, a bool, a number, a string, or a list of such."""
    if isinstance(value, (list, tuple)):
        return deep > 0 and all(is_plain(each, deep - 1) for each in value)
    return value is None or isinstance(value, (bool, str)) or is_number(value)


def _is_number_of(kind):
    """Tell whether a number of the optimizer's state fits the dtype that it is said to have."""
    if not isinstance(kind, dict) or "value" not in kind or not kind.keys() <= {"value", "dtype"}:
        return False
    value, name = kind["value"], kind.get("dtype")
    if "dtype" not in kind:
        return value is None or isinstance(value, bool) or is_number(value)
    if not isinstance(name, str) or name not in DTYPES:
        return False
    dtype = DTYPES[name]
    if dtype is torch.bool or isinstance(value, bool):
        return dtype is torch.bool and isinstance(value, bool)
    if dtype.is_floating_point:
        return is_number(value)
    return type(value) is int and not dtype.is_complex and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


STRING = Leaf("a string", lambda x: isinstance(x, str))
COUNT = Leaf("a count", lambda x: type(x) is int and 0 <= x < LARGEST)
POSITIVE = Leaf("a count above 0", lambda x: type(x) is int and 0 < x < LARGEST)
DTYPE = Leaf("the name of a dtype, such as float32", lambda x: isinstance(x, str) and x in DTYPES)
PLAIN = Leaf("a number, a string, or a list of them", is_plain)
HASH = Leaf("a SHA-256", lambda x: isinstance(x, str) and len(x) == 64)
COUNTS = Leaf("a list of counts", lambda x: isinstance(x, list) and all(map(COUNT.fits, x)))
PIECE = Leaf("[first, end], or [first, end, offsets, lengths]", lambda x: isinstance(x, list) and len(x) in (2, 4, 5, 6)
             and all(map(COUNT.fits, x[:2])) and all(map(COUNTS.fits, x[2:])))
KIND = Leaf("a dtype, or a value that fits its dtype", lambda x: mismatch(x, {"dtype": DTYPE}) is None
            or _is_number_of(x))
TENSOR = Leaf("a dense tensor with values", lambda x: isinstance(x, torch.Tensor) and x.layout is torch.strided
              and x.device.type != "meta" and not x.is_quantized)
STATE = Leaf("a dense tensor or a number", lambda x: TENSOR.fits(x) or x is None or isinstance(x, bool) or is_number(x))

MANIFEST = {
    "format": COUNT, "folder": STRING, "about": Each(PLAIN), "world_size": POSITIVE, "step": COUNT, "optimizer": STRING,
    "defaults": Each(PLAIN), "groups": [{"parameters": [STRING], "hyperparameters": Each(PLAIN)}],
    "parameters": Each({"shape": [COUNT], "dtype": DTYPE, "held": DTYPE}),
    "rest": Each({"shape": [COUNT], "dtype": DTYPE}), "states": Each(Each(KIND)),
    "files": Each({"bytes": COUNT, "sha256": HASH, "pieces": Each(PIECE)}), "hosts?": [STRING],
}
STATE_DICT = {"model": Each(TENSOR), "optimizer": Each(Each(STATE)), "class": STRING, "step": COUNT,
              "param_groups": [Each(PLAIN, {"params": [STRING]})],
              "own?": {"about": STRING, "ranks": [Each(TENSOR)]}}
