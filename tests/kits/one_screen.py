"""What every paper promises: one screen, nothing else of refimpl, and a place in the order of reading."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "refimpl"


def check_paper(package, name, also=()):
    """Fail unless refimpl/papers/<name>.py has at most 90 lines of 120 characters, docstrings included, and imports
    nothing but torch, Python's own and `also`; and unless refimpl/<package> names a paper first in its order of
    reading, and this one somewhere."""
    lines = (PACKAGE / "papers" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 90, f"{len(lines)} lines"
    assert max(map(len, lines)) <= 120, [f"line {n}: {len(line)}" for n, line in enumerate(lines, 1) if len(line) > 120]
    rooms = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Import):
            rooms |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports of refimpl"
            rooms.add(node.module.partition(".")[0])
    assert rooms <= {"torch", *sys.stdlib_module_names, *also}, rooms
    said = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text()))
    papers = {f"papers/{path.stem}" for path in (PACKAGE / "papers").glob("*.py")}
    files = papers | {path.stem for path in (PACKAGE / package).glob("*.py")}
    named = [word for word in said.split("`")[1::2] if word in files]
    assert named[0] in papers and f"papers/{name}" in named, named
