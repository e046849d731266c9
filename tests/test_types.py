"""Types of the public face: each argument and each return has one, and what is loaded when asked is known to a checker.

`make test` runs mypy over tests/types, whose two files say what must pass and what must not.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import refimpl

PACKAGE = Path(refimpl.__file__).parent
TYPED = ["memory", "zero", "comm", "checkpointing", "accumulation", "mixed_precision", "attention", "cross_entropy",
         "offload", "tensor", "context", "pipeline", "compression", "parallel", "engine", "activations", "saving",
         "allocator", "mlp", "sequence_length", "explain", "estimate", "rehearse", "phantom", "ranks",
         "guard.budget", "pytest_plugin", "model", "mesh", "sharding", "catalog", "config", "data", "rotary",
         "optimizer_subset", "others", "side_effects", "versions"]
DUNDERS = {"__init__", "__call__", "__enter__", "__exit__", "__iter__", "__len__", "__getitem__", "__contains__"}


def functions(module):
    """Yield (name, function) of all that a module exports: functions, and public methods of classes."""
    for name in getattr(module, "__all__", None) or defined_in(module):
        thing = getattr(module, name)
        if inspect.isclass(thing):
            for base in thing.__mro__:
                if base.__module__.startswith("refimpl."):
                    yield from ((f"{name}.{key}", bare(value)) for key, value in vars(base).items()
                                if not key.startswith("_") or key in DUNDERS)
        else:
            yield name, bare(thing)


def defined_in(module):
    return [name for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__]


def bare(thing):
    """Return the function in a property, a class method or a decorated function."""
    thing = getattr(thing, "fget", None) or getattr(thing, "__func__", None) or getattr(thing, "func", None) or thing
    return inspect.unwrap(thing) if callable(thing) else thing


def untyped(name, function):
    """Return the arguments of a function of ours without a type, and "return"; [] of what is none."""
    if not inspect.isfunction(function) or not Path(function.__code__.co_filename).is_relative_to(PACKAGE):
        return []
    arguments = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    if arguments and arguments[0].name in ("self", "cls"):
        arguments = arguments[1:]
    found = [each.name for each in arguments if each.annotation is each.empty]
    return found + ["return"] * ("return" not in function.__annotations__)


@pytest.mark.parametrize("name", TYPED)
def test_every_argument_and_return_has_a_type(name):
    found = list(functions(importlib.import_module(f"refimpl.{name}")))
    assert found and {each: missing for each, function in found if (missing := untyped(each, function))} == {}


def test_what_has_no_type_is_found():
    def partly(a: int, b, *c: object, **d):
        return a

    partly.__code__ = partly.__code__.replace(co_filename=str(PACKAGE / "model.py"))
    assert untyped("partly", partly) == ["b", "d", "return"]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_what_is_loaded_when_asked_is_imported_for_types(path):
    """A checker does not know `__getattr__`: each name stands in `if TYPE_CHECKING` once more, from the same module."""
    lazy, for_types = set(), set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("lazily("):
            lazy = {(module, name) for module, names in ast.literal_eval(node.value.args[1]).items()
                    for name in names.split()}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types = {("." * each.level + each.module, name.name) for each in node.body for name in each.names}
    assert lazy <= for_types
