"""The tool that makes build cells of pages, and what a page calls: the reader's function if it is right, else ours."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from blanks import blank
from exercises import Exercise

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("blanks_tool", ROOT / "tools" / "blanks.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

DOUBLED = '''def doubled(x):
    """Return 2x, of x (n,)."""
    y = x + x
    return y'''
KEPT = '''class Kept(Base):
    """Keep x."""

    @staticmethod
    def forward(ctx, x):
        """Return x."""
        ctx.x = x
        return x

    def plain(self):
        return 1'''
MODULE = f'''import torch
from . import blank

LIMIT = 3


{DOUBLED}


@blank(doubled, "parity and bytes", torch.Tensor)
def check_doubled(doubled):
    """Say what is wrong."""


{KEPT}


@blank(Kept, "bytes")
def check_kept(Kept):
    """Say what is wrong."""
'''
EMPTY = 'def doubled(x):\n    """Return 2x, of x (n,)."""\n    ...'


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A course of one page, solved."""
    (tmp_path / "notebooks" / "blanks").mkdir(parents=True)
    (tmp_path / "notebooks" / "blanks" / "doubling.py").write_text(MODULE)
    output = new_output("stream", text="4\n")
    nbformat.write(new_notebook(cells=[
        new_markdown_cell("# 00 · Doubling"), new_code_cell("from blanks import doubling as build"),
        new_code_cell(DOUBLED), new_code_cell("print(doubled(2))", outputs=[output]), new_code_cell(KEPT)]),
        tmp_path / "notebooks" / "00_doubling.ipynb")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["blanks.py", *map(str, arguments)])
    return tool.main()


def sources(root):
    return [cell.source for cell in nbformat.read(root / "notebooks" / "00_doubling.ipynb", 4).cells]


def test_a_solved_cell_becomes_three(root, monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 1 and "differs from notebooks/blanks/doubling.py" in capsys.readouterr().out
    assert run(monkeypatch) == 0
    cells = nbformat.read(root / "notebooks" / "00_doubling.ipynb", 4).cells
    assert [cell.source for cell in cells[2:6]] == [
        EMPTY, "doubled = build.check_doubled(doubled)",
        f"<details><summary>Our doubled</summary>\n\n```python\n{DOUBLED}\n```\n\n</details>", "print(doubled(2))"]
    assert cells[5].outputs[0].text == "4\n"  # of a cell that stays
    assert cells[6].source == ('class Kept(Base):\n    """Keep x."""\n\n    @staticmethod\n    def forward(ctx, x):\n'
                               '        """Return x."""\n        ...\n\n    def plain(self):\n        return 1')
    assert run(monkeypatch, "--check") == 0


def test_a_second_run_changes_nothing_and_an_edit_of_ours_reaches_the_page(root, monkeypatch):
    run(monkeypatch)
    once = (root / "notebooks" / "00_doubling.ipynb").read_bytes()
    run(monkeypatch)
    assert (root / "notebooks" / "00_doubling.ipynb").read_bytes() == once
    module = root / "notebooks" / "blanks" / "doubling.py"
    module.write_text(module.read_text().replace("y = x + x", "y = 2 * x"))
    assert run(monkeypatch, "--check") == 1 and run(monkeypatch) == 0
    assert "y = 2 * x" in sources(root)[4] and sources(root)[2] == EMPTY and len(sources(root)) == 9


@pytest.mark.parametrize(("cells", "words"), [
    ([DOUBLED, DOUBLED, KEPT], "doubled is defined in 2 cells: expected one, which the reader fills"),
    ([KEPT], "doubled is defined in 0 cells"),
    ([DOUBLED + "\nprint(1)", KEPT], "the cell that defines doubled has more in it: give doubled a cell of its own")])
def test_a_page_that_cannot_have_its_blanks_is_named_and_left(root, monkeypatch, capsys, cells, words):
    path = root / "notebooks" / "00_doubling.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), path)
    before = path.read_bytes()
    assert run(monkeypatch) == 1 and f"00_doubling.ipynb: {words}" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_page_that_is_not_there(root, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, root / "notebooks" / "01_none.ipynb")
    assert "there is no such page" in capsys.readouterr().err


def test_pages_have_the_blanks_of_their_modules():
    done = subprocess.run([sys.executable, ROOT / "tools" / "blanks.py", "--check"], capture_output=True, text=True)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


# --- what a page calls -----------------------------------------------------------------------------------------------


def twice(x):
    """Return 2x."""
    return 2 * x


@blank(twice, "parity", int)
def check_twice(twice):
    return None if twice(3) == 6 and twice(5) == 10 else f"twice(3) is 6, yours is {twice(3)}"


def right(x):
    return x + x


def wrong(x):
    return x * x


def blank_answer(x):
    """Return 2x."""


@pytest.mark.parametrize(("answer", "later", "words"), [
    (right, right, "twice: right, on parity. The cells below use yours.\n"),
    (wrong, twice, "twice: twice(3) is 6, yours is 9\nThe cells below use ours until yours is right.\n"),
    (blank_answer, twice, "twice: not answered yet. The cells below use ours.\n"),
    (lambda x: 1 / 0, twice, "twice: your function raises ZeroDivisionError"),
    (lambda: 6, twice, "twice: your function is called with 1 argument (int), and does not take them"),
    (6, twice, "twice: expected your function itself, without brackets after its name; you give 6 (int)"),
    (lambda x: "6", twice, "twice: expected a number, you return '6' (str)")])
def test_later_cells_use_the_reader_s_if_it_is_right(monkeypatch, capsys, answer, later, words):
    monkeypatch.setattr(Exercise, "apart", False)
    assert check_twice(answer) is later
    assert capsys.readouterr().out.startswith(words)
