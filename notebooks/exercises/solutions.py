"""The solutions of the exercises: the first right answer of each table in tests/exercises, and what it calls."""

import ast
import html
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests" / "exercises"


def show(slug, name):
    """Show the solution of one exercise: folded in a notebook, as text elsewhere."""
    from IPython import get_ipython
    from IPython.display import HTML, display

    text = source(slug, name)
    if get_ipython() is None:
        print(text)
    else:
        display(HTML(f"<details><summary>A solution of the {name} exercise</summary><pre>{html.escape(text)}</pre>"
                     "</details>"))


def source(slug, name):
    """Return the source of a right answer to the exercise `name` of the page `slug`, with the functions that it uses.

    FileNotFoundError where there are no tests: solutions stand beside them, in a checkout.
    """
    lines = _path(slug).read_text(encoding="utf-8").splitlines()
    answer, nodes = _needed(slug, name)
    taken = ["\n".join(lines[_first(node) - 1 : node.end_lineno]) for node in nodes]
    return "\n\n\n".join(taken if isinstance(answer, ast.Name) else [*taken, f"answer = {ast.unparse(answer)}"])


def parts(slug, name):
    """List (first, last) lines of what a solution is made of, in the module of its tests."""
    answer, nodes = _needed(slug, name)
    return [(_first(node), node.end_lineno) for node in ([] if isinstance(answer, ast.Name) else [answer]) + nodes]


def parts_of_blank(slug, name):
    """List (first, last) lines of the function `name` that a page has its reader build."""
    path = TESTS.parents[1] / "notebooks" / "blanks" / f"{slug}.py"
    return [(_first(node), node.end_lineno) for node in ast.parse(path.read_text(encoding="utf-8")).body
            if getattr(node, "name", "") == name]


def _path(slug):
    path = TESTS / f"test_{slug}.py"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: solutions are part of the tests of a checkout of refimpl")
    return path


def _needed(slug, name):
    """Return the node of a right answer, and the statements of the module that it uses, in order."""
    tree = ast.parse(_path(slug).read_text(encoding="utf-8"))
    answer = _first_right(tree, name)
    defined = {each: node for node in tree.body for each in _names(node)}
    needed, look_at = set(), [answer]
    while look_at:
        for node in ast.walk(look_at.pop()):
            if isinstance(node, ast.Name) and node.id in defined and node.id not in needed:
                needed.add(node.id)
                look_at.append(defined[node.id])
    return answer, [node for node in tree.body if needed & set(_names(node))]


def _first_right(tree, name):
    """Return the node of the first right answer to an exercise, in the table `ANSWERS` of a module of tests."""
    table = next(node.value for node in tree.body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ANSWERS")
    call = next(value for key, value in zip(table.keys, table.values, strict=True) if key.attr == name)
    return next(each.value for each in call.keywords if each.arg == "right").elts[0]


def _names(node):
    """Return the names that a statement of a module defines; none of an import or of the tests themselves."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name) and target.id != "ANSWERS"]
    return []


def _first(node):
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
