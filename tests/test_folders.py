"""refimpl/README.md has one line for each folder and module of the first level, and its links lead there."""

import re
from pathlib import Path

from tools.architecture import FLOORS, TECHNIQUES

PACKAGE = Path(__file__).parent.parent / "refimpl"
TEXT = (PACKAGE / "README.md").read_text()
ROWS = re.findall(r"^\| \[([^]]+)\]\(([^)]+)\) \| (.+) \|$", TEXT, re.MULTILINE)


def first_level():
    """Return {name: the file that its line leads to} of what stands in refimpl/."""
    found = {path.parent.name: f"{path.parent.name}/__init__.py" for path in PACKAGE.glob("*/__init__.py")}
    return found | {path.name: path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}


def test_each_folder_and_module_has_one_line():
    names = [name.replace("\\", "") for name, _, _ in ROWS]
    assert len(names) == len({*names}) and names[0] == "papers"
    assert {name: link for name, (_, link, _) in zip(names, ROWS, strict=True)} == first_level()


def test_a_line_is_short():
    assert all(len(words.split()) <= 20 for _, _, words in ROWS)


def test_the_section_of_techniques_has_all_of_them():
    section = TEXT.partition("## Techniques\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| \[(\w+)\]", section, re.MULTILINE)} == TECHNIQUES


def test_the_lowest_floor_is_the_lowest():
    section = TEXT.partition("## The lowest floor\n")[2]
    assert {FLOORS[name] for name in re.findall(r"^\| \[(\w+)(?:\.py)?\]", section, re.MULTILINE)} == {0}
