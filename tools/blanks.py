"""Makes the build cells of pages: functions of notebooks/blanks/SLUG.py, without their bodies, for the reader to write.

    python tools/blanks.py                        write those of every page
    python tools/blanks.py notebooks/04_….ipynb   of one page
    python tools/blanks.py --check                change nothing; say what does not agree, and exit with 1

A page may be solved when it begins: a cell that defines a function of notebooks/blanks/SLUG.py becomes three. The first
is the function with its docstring and `...`; the second calls its check, and takes the reader's function or ours; the
third is our own, folded. Cells that stay as they are keep their outputs.
"""

import argparse
import ast
import json
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
KEY = "blank"  # in a cell's metadata: the name of the function, and which of the three cells it is
SUMMARY = "<details><summary>Our {name}</summary>"


def blanks_of(path):
    """Return {name of a function: (name of its check, its source, its source without bodies)} of a module of blanks."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = {}
    for check in defined.values():
        for decorator in check.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "blank":
                name = decorator.args[0].id
                lines = text.splitlines()[_first(defined[name]) - 1 : defined[name].end_lineno]
                found[name] = check.name, "\n".join(lines), emptied("\n".join(lines))
    return found


def emptied(source):
    """Return a function, or a class whose methods have docstrings, with `...` in place of bodies."""
    lines = source.splitlines()
    top = ast.parse(source).body[0]
    functions = [top] if isinstance(top, ast.FunctionDef) else [
        each for each in top.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)]
    for node in reversed(functions):
        doc, indent = node.body[0], " " * node.body[0].col_offset
        lines[doc.end_lineno : node.end_lineno] = [indent + "..."]
    return "\n".join(lines)


def _first(node):
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def with_blanks(notebook, blanks):
    """Return the cells of a page with its build cells as they have to be. ValueError if one cannot be made."""
    calls = {f"{name} = build.{check}({name})" for name, (check, *_) in blanks.items()}
    cells = [cell for cell in notebook.cells
             if cell.metadata.get(KEY, {}).get("cell") not in ("check", "ours") and cell.source not in calls]
    there = {cell.source: cell for cell in notebook.cells}
    for name, (check, source, empty) in blanks.items():
        at = [i for i, cell in enumerate(cells) if cell.cell_type == "code" and name in defined_in(cell.source)]
        if len(at) != 1:
            raise ValueError(f"{name} is defined in {len(at)} cells: expected one, which the reader fills")
        if defined_in(cells[at[0]].source) != [name]:
            raise ValueError(f"the cell that defines {name} has more in it: give {name} a cell of its own")
        ours = f"{SUMMARY.format(name=name)}\n\n```python\n{source}\n```\n\n</details>"
        new = [nbformat.v4.new_code_cell(empty), nbformat.v4.new_code_cell(f"{name} = build.{check}({name})"),
               nbformat.v4.new_markdown_cell(ours)]
        new[0].execution_count = cells[at[0]].execution_count  # a definition, which shows nothing whatever it says
        new = [there.get(cell.source, cell) for cell in new]
        for cell, kind in zip(new, ("blank", "check", "ours"), strict=True):
            cell.metadata[KEY] = {"name": name, "cell": kind}
        cells[at[0] : at[0] + 1] = new
    return cells


def defined_in(source):
    """List what a cell defines and calls at its top: names of functions and classes, and "" for anything else."""
    try:
        return [getattr(node, "name", "") for node in ast.parse(source).body]
    except SyntaxError:  # a magic
        return []


def texts(cells):
    """Return what is compared: the sources of cells, and what their metadata say."""
    return [(cell.source, json.dumps(cell.metadata, sort_keys=True)) for cell in cells]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--check", action="store_true", help="change nothing, and exit with 1 if anything differs")
    chosen = parser.parse_args()
    wrong = 0
    for page in chosen.pages or sorted((ROOT / "notebooks").glob("*.ipynb")):
        module = ROOT / "notebooks" / "blanks" / f"{page.stem.partition('_')[2]}.py"
        if not page.exists():
            parser.error(f"{page}: there is no such page")
        if not module.exists():
            continue
        notebook = nbformat.read(page, as_version=4)
        before = texts(notebook.cells)
        try:
            cells = with_blanks(notebook, blanks_of(module))
        except ValueError as error:
            print(f"{page.name}: {error}")
            wrong += 1
            continue
        if texts(cells) != before:
            wrong += chosen.check
            print(f"{page.name}: {'differs from' if chosen.check else 'written from'} {module.relative_to(ROOT)}")
            if not chosen.check:
                notebook.cells = cells
                nbformat.write(notebook, page)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
