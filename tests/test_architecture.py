"""docs/architecture.md: its drawing is what the imports are, and its journeys go through functions that there are."""

import ast
import re
from pathlib import Path

import pytest

from tools import architecture

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
JOURNEYS = TEXT.partition("## Four journeys\n")[2].split("\n### ")[1:]
STOPS = re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", "".join(JOURNEYS))


def defined(path):
    """Return the functions and classes of a file, a method as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
                      and isinstance(node, ast.ClassDef)}
    return found


def test_the_drawing_is_what_the_imports_are(capsys):
    assert architecture.main(["--check"]) == 0, capsys.readouterr().out


def test_an_import_that_the_drawing_lacks_is_seen(monkeypatch, capsys):
    found = architecture.arrows()
    found["mlp"].add("ranks")
    monkeypatch.setattr(architecture, "arrows", lambda: found)
    assert architecture.main(["--check"]) == 1 and "run `python tools/architecture.py`" in capsys.readouterr().out


def test_the_drawing_shows_floors_and_arrows(monkeypatch):
    page = f"a\n{architecture.BEGIN}old\n{architecture.END}\nb"
    drawn = architecture.redrawn(page, {"zero": {"comm", "common"}, "comm": {"ranks"}, "ranks": set(), "common": set()})
    assert drawn.startswith("a\n") and drawn.endswith("\nb") and "old" not in drawn
    assert "    floor3 --> comm\n    floor3 --> common\n" in drawn and "    comm --> ranks\n" in drawn
    assert "| `zero` | comm, common |" in drawn and "| `ranks` | nothing of ours |" in drawn
    assert architecture.redrawn(drawn, {"zero": set()}).count(architecture.BEGIN) == 1


def test_there_are_four_journeys_of_at_most_ten_lines():
    lines = [re.findall(r"^(\d+)\. `", journey, re.MULTILINE) for journey in JOURNEYS]
    assert len(lines) == 4 and all(each == [str(i + 1) for i in range(len(each))] for each in lines)
    assert all(5 <= len(each) <= 10 for each in lines) and len(STOPS) >= 40


@pytest.mark.parametrize("path", sorted({path for path, _ in STOPS}))
def test_the_functions_on_the_way_are_there(path):
    named = {name for where, name in STOPS if where == path}
    assert named <= defined(ROOT / "refimpl" / path)


def test_a_name_beside_another_is_there_too():
    """A line may name a second function of its file, or one that it calls."""
    names = {name for line in "\n".join(JOURNEYS).splitlines() for name in re.findall(r"`([\w.]+)`", line)[1:]}
    known = set().union(*(defined(ROOT / "refimpl" / path) for path, _ in STOPS))
    assert {name for name in names if not name.endswith(".py")} - known <= {"torch.compile", "parameter.data"}
