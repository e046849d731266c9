"""How much stands behind a module: the files that a reader opens, and those that Python loads.

    python tools/closures.py                  the table of four starts
    python tools/closures.py zero/zero1       the files behind one, and who brought each

Read: from a file to each file whose names it imports, as a reader follows them: a name of a package leads to the file
that defines it. What a function imports when it is called, as a picture, is not opened. Loaded: `sys.modules` after the
import, in a process of its own. What is imported for types alone (`if TYPE_CHECKING`) is neither.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "refimpl"
STARTS = {"zero/zero1": (45, 4700, 55), "attention/flash": (14, 1700, 22), "tensor/linear": (11, 1550, 34),
          "accumulation/accumulate": (21, 2400, 31)}  # files, lines, loaded: at most


def main(arguments):
    """Print the table, or one closure."""
    if arguments:
        start = file_of(arguments[0].removesuffix(".py").split("/"))
        for path, by in sorted(closure(start).items()):
            print(f"{lines(path):5}  {path.relative_to(PACKAGE)}  {'' if by is None else by.relative_to(PACKAGE)}")
        return
    for name in STARTS:
        print("{}: {} files, {} lines; loaded {}".format(name, *read(name), loaded(name)))


def read(name):
    """Return (files, lines) that a reader opens from a module such as "zero/zero1"."""
    found = closure(file_of(name.split("/")))
    return len(found), sum(map(lines, found))


def loaded(name):
    """Return how many modules of ours Python has once it has imported this one."""
    code = (f"import sys, refimpl.{name.replace('/', '.')}\n"
            "print(sum(each.split('.')[0] == 'refimpl' for each in sys.modules))")
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              cwd=PACKAGE.parent).stdout)


def closure(start):
    """Return {file: the file that led to it} of all that a reader opens from `start`."""
    found, todo = {start: None}, [start]
    for path in todo:
        for each in imported(path):
            if each not in found:
                found[each] = path
                todo.append(each)
    return found


def circle(graph):
    """Return files of which each imports the next, and the last is the first again; None if there are none. `graph`:
    {file: {files}}."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]


@functools.cache
def imported(path, everywhere=False):
    """Return {file} of the package that the names are of which a file imports; `everywhere`: in functions, too."""
    found = set()
    for node in run_time(parsed(path)) if everywhere else parsed(path).body:
        if isinstance(node, ast.ImportFrom) and (base := base_of(path, node)) is not None:
            for name in node.names:
                found.add(defining(base, name.name))
    return found - {None, path}


def run_time(tree):
    """Yield a tree's nodes, but for those below `if TYPE_CHECKING:`, which Python never runs."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node = ast.Module(node.orelse, [])
        yield from run_time(node)


def base_of(path, node):
    """Return the parts of the module that a `from … import` names, from the package on; None if it is none of ours."""
    module = node.module.split(".") if node.module else []
    if node.level:
        package = path.relative_to(PACKAGE).parts[:-1]
        return [*package[: len(package) - node.level + 1], *module]
    return module[1:] if module[:1] == ["refimpl"] else None


def defining(base, name):
    """Return the file that defines `name` of a module."""
    if (module := file_of([*base, name])) is not None:
        return module
    path = file_of(base)
    if path is not None and path.name == "__init__.py":
        for node in parsed(path).body:
            if isinstance(node, ast.ImportFrom) and name in [each.asname or each.name for each in node.names]:
                original = next(each.name for each in node.names if name == (each.asname or each.name))
                return defining(base_of(path, node), original)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("lazily("):
                for module, names in ast.literal_eval(node.value.args[1]).items():
                    if name in names.split():
                        level = len(module) - len(module.lstrip("."))
                        return defining(base_of(path, ast.ImportFrom(module[level:], [], level)), name)
    return path


def file_of(parts):
    """Return the file of a module, its parts from the package on; None if there is none."""
    path = PACKAGE.joinpath(*parts)
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if parts and each.exists()), None)


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def lines(path):
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    main(sys.argv[1:])
