"""What every `paper.py` promises: one screen, and nothing else of refimpl."""

import ast
import sys
from pathlib import Path

LINES = 90
TAKES = {"torch", *sys.stdlib_module_names}


def check_screen(module, also=()):
    """At most LINES lines, docstrings included; it imports torch, the standard library and `also`."""
    text = Path(module.__file__).read_text()
    assert len(text.splitlines()) <= LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else node.module.partition(".")[0])
    assert imported <= {*TAKES, *also}, imported


def comes_first(package, name="paper"):
    """Whether the package names it first in its order of reading."""
    words = package.__doc__.partition("rder of reading")[2]
    return words.partition("`")[2].startswith(f"{name}` (the idea in one screen), then")
