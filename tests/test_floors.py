"""The house: a file imports only from floors below its own, and no technique imports another (refimpl/__init__.py)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import closures
from tools.architecture import FLOORS, GROUND, TECHNIQUES, imports, room

PACKAGE = Path(__file__).parent.parent / "refimpl"


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
    ("from refimpl.engine.dry import x", {"engine"}),
    ("get, names = lazily(__name__, {'..saving': 'a', '.late': 'b', 'refimpl.tensor': 'c'})",
     {"saving", "checkpointing", "tensor"}),
    ("if TYPE_CHECKING:\n    from ..engine import x\nelse:\n    from ..model import x", {"model"})])
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


LIBRARIES = {"transformers", "timm", "peft", "lightning", "pytorch_lightning"}
KNOWING = {"known_models", "estimate", "explain", "guard"}  # what may know others' models by name
ASKING = {"guard/trainer_callback.py"}  # what is imported by the name of the library that it is for
NAMES = {"__name__", "__qualname__", "__module__"}
TEXT = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "get"}
UNRELATED = {  # who reads the name of a class or function for another reason
    "others.py": "whether something is torch's or ours, and nobody need be asked",
    "attention/kernel_traffic.py": "operations of torch that make empty tensors",
    "comm/same_model.py": "torch's own code is compared by torch's version",
    "ranks/pickling.py": "where a function and a module are found again",
    "zero/units.py": "hooks that are ours"}


def libraries(path, top=False):
    """The libraries of models that a file imports: wherever in it, or where it is imported itself."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found & LIBRARIES


def names_compared(path):
    """The lines of a file that compare the name of a class or function, look it up, or ask how it begins."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        parts = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT:
            parts = [node.func.value, *node.args]
        elif isinstance(node, (ast.Subscript, ast.Match)):
            parts = [node.slice if isinstance(node, ast.Subscript) else node.subject]
        found += [node.lineno for part in parts for each in ast.walk(part)
                  if isinstance(each, ast.Attribute) and each.attr in NAMES
                  or isinstance(each, ast.Call) and getattr(each.func, "id", "") == "getattr"
                  and getattr(each.args[1], "value", "") in NAMES]
    return found


def test_models_of_others_are_known_in_one_place():
    outside = [path for path in FILES if room(path) not in KNOWING]
    assert {str(path.relative_to(PACKAGE)): found for path in outside if (found := libraries(path))} == {}
    named = {str(path.relative_to(PACKAGE)): found for path in outside if (found := names_compared(path))}
    assert named.keys() == UNRELATED.keys(), named
    loading = {str(path.relative_to(PACKAGE)) for path in FILES if libraries(path, top=True)}
    assert loading == ASKING, "nor are they loaded before they are asked for"


@pytest.mark.parametrize("line", [
    'type(x).__name__ == "Conv1D"', 'kind.__name__ in KINDS', 'type(x).__module__.startswith("transformers.")',
    'getattr(loss, "__name__", None) != "ForCausalLMLoss"', 'any(each.__module__ == "timm" for each in kinds)',
    'TABLE[type(x).__name__]', 'TABLE.get(type(x).__name__)', 'type(x).__module__.split(".")[0] in LIBRARIES'])
def test_a_comparison_of_names_is_found(line, tmp_path):
    (tmp_path / "a.py").write_text(f'f"{{type(x).__name__}} is wrong"\n{line}')
    assert {*names_compared(tmp_path / "a.py")} == {2}


def test_no_file_imports_one_that_leads_back_to_it():
    circle = closures.circle({path: closures.imported(path, everywhere=True) for path in FILES})
    assert circle is None, " → ".join(str(path.relative_to(PACKAGE)) for path in circle)


def test_a_circle_is_found_within_functions_and_through_packages(tmp_path, monkeypatch):
    for name, text in (("a.py", "from .b import x"), ("b/__init__.py", "from .inner import x"),
                       ("b/inner.py", "def x():\n    from ..c import y"), ("c.py", "from .a import z"),
                       ("d.py", "from . import a")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(closures, "PACKAGE", tmp_path)
    found = closures.circle({path: closures.imported(path, True) for path in tmp_path.rglob("*.py")})
    first, *names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert first == names[-1] and set(zip([first, *names], names, strict=False)) == {
        ("a.py", "b/inner.py"), ("b/inner.py", "c.py"), ("c.py", "a.py")}


LIGHT = ("zero", "tensor", "context", "pipeline", "attention", "offload", "comm", "cross_entropy", "checkpointing",
         "allocator", "accumulation", "mesh", "mlp")
HEAVY = {"matplotlib", "PIL", "transformers", "peft", "timm", "refimpl.memory.tracker", "refimpl.known_models"}


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
                       ("b/__init__.py", "from .inner import y as x\n"
                                         "get, names = lazily('b', {'.late': 'w', '..e': 'v'})"),
                       ("b/inner.py", "y = 1"), ("b/late.py", "from . import v"), ("c/__init__.py", ""),
                       ("c/d.py", "import torch\nfrom ..b import w\nz = 2"), ("e.py", "picture = 3")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(closures, "PACKAGE", tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in closures.closure(tmp_path / "a.py")} == {
        "a.py", "b/inner.py", "c/d.py", "b/late.py", "e.py"}


def test_each_paper_has_its_line_in_the_order_of_reading():
    listed = [line.split()[0] for line in ast.get_docstring(closures.parsed(PACKAGE / "papers" / "__init__.py"))
              .splitlines() if line.startswith("    ")]
    assert sorted(listed) == sorted(path.stem for path in (PACKAGE / "papers").glob("[a-z]*.py")) and len(listed) >= 20
