"""A recipe as text: TOML in and out, what each field means, and what changed."""

import json
import os
import tomllib
from dataclasses import fields
from typing import Any

from ..untrusted.text import shown
from .recipe_rules import RULES, known

MOST = 2**20  # bytes of a file
ABOUT = """# Recipe: one description of a training

`Recipe(precision="bf16", zero=3, dp=8)` says what is put together, `build(recipe, model, comm)` does it. A recipe is
also a file in TOML: `Recipe.from_toml("recipe.toml")`, `recipe.to_toml()`. A test writes this page,
`tests/engine/test_recipe_pairs.py`."""
TOGETHER = """{pairs:,} pairs of two fields' values go together: {recipes} recipes on up to four ranks hold each of
them, and a test trains them beside one process. These pairs are refused before ranks start, all that is wrong with a
recipe in one error:"""


def to_toml(recipe):
    """Return the fields of a recipe that are not the default, each with its meaning in a comment."""
    means = {each.name: each.metadata["means"] for each in fields(recipe)}
    return "".join(f"# {means[name]}\n{name} = {_value(value)}\n" for name, value in recipe.changed().items())


def _value(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value)  # strings and numbers are written alike in both


def from_toml(cls, source):
    """Return the recipe of a file, or of a text with a line break or an equals sign."""
    if isinstance(source, str) and ("=" in source or "\n" in source or not source):
        where, text = "this text", source
    else:
        where = os.fspath(source)
        if os.path.getsize(where) > MOST:
            raise ValueError(f"{shown(where)}: {os.path.getsize(where):,} bytes: expected at most {MOST:,}, a recipe "
                             "has some lines")
        with open(where, "rb") as file:
            raw = file.read()
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown(where)}: is no text in UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{shown(where)}: is no TOML: {error}") from None
    known(found, cls)
    return cls(**found)


def describe(cls: Any) -> str:
    """Return all fields of a recipe as text: name, default, unit or values, meaning."""
    lines = []
    for each in fields(cls):
        values, unit = each.metadata["values"], each.metadata["unit"]
        default = "none" if each.default is None else _value(each.default)
        kind = ", ".join(map(str, values)) if values is not None else unit or "text"
        lines.append(f"{each.name} = {default}\n    {each.metadata['means']} ({kind})")
    return "\n".join(lines)


def document(cls: Any, recipes: int, pairs: int) -> str:
    """Return docs/recipe.md: all fields, and what is refused. `recipes`, `pairs`: how many a test trains."""
    lines = [*ABOUT.splitlines(), "", "| Field | Default | Values or unit | Meaning |", "|---|---|---|---|"]
    for each in fields(cls):
        values, unit = each.metadata["values"], each.metadata["unit"]
        kind = ", ".join(f"`{_value(value)}`" for value in values) if values is not None else ""
        default = "none" if each.default is None else f"`{_value(each.default)}`"
        lines.append(f"| `{each.name}` | {default} | {'; '.join(filter(None, (kind, unit))) or 'text'} | "
                     f"{each.metadata['means']} |")
    lines += ["", "## What goes together", "", *TOGETHER.format(recipes=recipes, pairs=pairs).splitlines(), "",
              "| Field | With | Reason, and what to do |", "|---|---|---|"]
    lines += [f"| `{rule.names[0]}` | `{rule.names[1]}` | {rule.why} |" for rule in RULES]
    return "\n".join(lines) + "\n"
