"""The house: a file imports only from floors below its own, and no technique imports another (refimpl/__init__.py)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import closures

PACKAGE = Path(__file__).parent.parent / "refimpl"
TECHNIQUES = {"mixed_precision", "checkpointing", "accumulation", "sequence_length", "activations", "attention",
              "cross_entropy", "mlp", "zero", "offload", "tensor", "context", "pipeline", "compression", "allocator"}
FLOORS = {**dict.fromkeys(("versions", "phantom", "ground", "papers", "elsewhere"), 0),
          **dict.fromkeys(("memory", "comm", "ranks"), 1),
          **dict.fromkeys(("sharding", "mesh", "model", "rotary", "config", "data", "catalog", "partial_step",
                           "unseen", "feed_forward", "saving", "proof"), 2),
          **dict.fromkeys(TECHNIQUES, 3),
          **dict.fromkeys(("engine", "planner", "estimate", "explain", "rehearse", "cli", "parallel", "__main__"), 4)}
GROUND = {"comm": {"ranks", "memory"}, "memory": set(), "ranks": {"memory"}}  # what stands on what on floor 1


def imports(path, package=PACKAGE):
    """The rooms of refimpl that a file imports from, wherever in it."""
    here = path.relative_to(package.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [base] if len(base) > 1 else [[*base, alias.name] for alias in node.names]
        found |= {parts[1] for parts in names if len(parts) > 1 and parts[0] == "refimpl"}
    return found


def room(path, package=PACKAGE):
    """The package, or the module of the first level, that a file belongs to."""
    return path.relative_to(package).with_suffix("").parts[0]


def wrong(here, there):
    """Why `here` must not import from `there`; None if it may."""
    if here == there or here == "__init__":
        return None
    if {here, there} - FLOORS.keys():
        return f"no floor is known for {sorted({here, there} - FLOORS.keys())}"
    if here in TECHNIQUES and there in TECHNIQUES:
        return "a technique does not import another"
    if FLOORS[here] == FLOORS[there] == 1:
        return None if there in GROUND[here] else f"{here} does not stand on {there}"
    if FLOORS[there] > FLOORS[here]:
        return f"floor {FLOORS[there]} is above floor {FLOORS[here]}"
    return None


FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def test_imports_go_down():
    faults = {(str(path.relative_to(PACKAGE)), there): wrong(room(path), there)
              for path in FILES for there in imports(path)}
    assert len(FILES) > 100 and {edge: fault for edge, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(("text", "found"), [
    ("from ..zero import Zero1", {"zero"}), ("from .. import engine", {"engine"}),
    ("import refimpl.zero.zero1", {"zero"}),
    ("def f():\n    from ..model import GPT", {"model"}), ("from .schedule import x\nimport torch", {"checkpointing"}),
    ("from refimpl.engine.dry import x", {"engine"})])
def test_an_import_is_found_wherever_it_stands(text, found, tmp_path):
    path = tmp_path / "refimpl" / "checkpointing" / "region.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert imports(path, tmp_path / "refimpl") == found


@pytest.mark.parametrize(("here", "there", "words"), [
    ("zero", "checkpointing", "does not import another"), ("memory", "comm", "does not stand on"),
    ("model", "zero", "above"), ("attention", "engine", "above"), ("zero", "unheard_of", "no floor")])
def test_what_runs_upward_or_across_is_named(here, there, words):
    assert words in wrong(here, there)


LIGHT = ("zero", "tensor", "context", "pipeline", "attention", "offload", "comm", "cross_entropy", "checkpointing",
         "allocator", "accumulation", "mesh")
HEAVY = {"matplotlib", "PIL", "transformers", "peft", "timm", "refimpl.memory.tracker"}


@pytest.mark.parametrize("name", LIGHT)
def test_a_technique_loads_neither_a_meter_nor_a_picture(name):
    code = f"import sys, refimpl.{name}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=PACKAGE.parent)
    assert HEAVY & set(done.stdout.split()) == set()


@pytest.mark.parametrize("name", closures.STARTS)
def test_what_stands_behind_a_technique_is_little(name):
    files, lines, modules = closures.STARTS[name]
    found = closures.read(name)
    assert found[0] <= files and found[1] <= lines and closures.loaded(name) <= modules


def test_a_reader_s_way_leads_to_the_file_that_defines_a_name(tmp_path, monkeypatch):
    for name, text in (("a.py", "from .b import x\nfrom .c.d import z\ndef f():\n    from .e import picture"),
                       ("b/__init__.py", "from .inner import y as x"), ("b/inner.py", "y = 1"), ("c/__init__.py", ""),
                       ("c/d.py", "import torch\nz = 2"), ("e.py", "picture = 3")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(closures, "PACKAGE", tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in closures.closure(tmp_path / "a.py")} == {
        "a.py", "b/inner.py", "c/d.py"}


def test_each_paper_has_its_line_in_the_order_of_reading():
    listed = [line.split()[0] for line in ast.get_docstring(closures.parsed(PACKAGE / "papers" / "__init__.py"))
              .splitlines() if line.startswith("    ")]
    assert sorted(listed) == sorted(path.stem for path in (PACKAGE / "papers").glob("[a-z]*.py")) and len(listed) == 20
