"""What CHANGELOG.md says went where is there, and no longer where it was."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from refimpl import catalog

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CHANGELOG.md").read_text()
MOVED = re.findall(r"^\| (`refimpl\.[^|]*) \| ([^|]*) \|$", TEXT, re.MULTILINE)


def modules(cell):
    """The modules of a cell: `a.b.c`, `.d` are a.b.c and a.b.d."""
    found = []
    for name in re.findall(r"`([\w.]+)`", cell):
        found.append(found[0].rpartition(".")[0] + name if name.startswith(".") else name)
    return found


def is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(("before", "now"), MOVED)
def test_a_module_that_moved_is_there_and_nowhere_else(before, now):
    old = modules(before)
    new = [f"{modules(now)[0]}.{name.rpartition('.')[2]}" for name in old] if "the same in" in now else modules(now)
    assert old and new and all(map(is_there, new)) and not any(map(is_there, old))


def test_all_rows_are_read():
    assert len(MOVED) == TEXT.count("\n| `refimpl.") >= 31


def test_the_version_is_the_first_one_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == re.search(r"^## (\S+)", TEXT, re.MULTILINE)[1]


def test_pages_have_the_numbers_that_it_says():
    newest = TEXT.split("\n## ")[1]
    rows = re.findall(r"^\| ([^|`]+) \| (\d\d) \| (\d\d) \|$", newest, re.MULTILINE)
    numbers = {page.title: page.number for page in catalog.pages()}
    assert bool(rows) == ("| page | before | now |" in newest)
    assert all(numbers[title] == now for title, _, now in rows)
    assert sorted(before for _, before, _ in rows) == sorted(now for _, _, now in rows)  # they change places
