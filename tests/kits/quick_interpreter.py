"""Triton's interpreter without two things that it does over and over to no effect: half of its time on small tiles."""

import dataclasses

import triton.language as tl
from triton.runtime import interpreter

walk = getattr(interpreter, "_patch_lang", None)


def quicken():
    """Once in a process. A Triton that has not what is left out here stays as it is."""
    builder = interpreter.interpreter_builder
    options = getattr(builder, "options", None)
    # Each sum, difference and product of integers is done again in 64 bits, for an assertion that `debug` alone makes.
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if walk is not None and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = walk_where_something_is_left


def walk_where_something_is_left(function):
    """A launch exchanges the builtins of triton.language, and puts them back when it ends. In between, each call of a
    helper walks through all of triton.language again: for nothing, unless its module has another name for it."""
    languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()
    return walk(function)
