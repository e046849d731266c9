"""The copies of pages in which a reader works: without outputs, never written over."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("learn", ROOT / "tools" / "learn.py")
learn = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(learn)


@pytest.fixture
def page(tmp_path):
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "00_page.ipynb"
    write(path, "guess = ...")
    return path


def write(path, source):
    cell = nbformat.v4.new_code_cell(source, execution_count=1, outputs=[nbformat.v4.new_output("stream", text="5\n")])
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Page"), cell]), path)


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_a_copy_has_the_cells_and_no_outputs(page, tmp_path):
    copy = learn.copy_page(page, tmp_path / "learn")
    assert copy == tmp_path / "learn" / "00_page.ipynb" and sources(copy) == sources(page)
    assert all(cell.execution_count is None and not cell.outputs for cell in nbformat.read(copy, 4).cells[1:])


def test_an_answer_stays_and_a_changed_page_comes_beside_it(page, tmp_path):
    folder = tmp_path / "learn"
    copy = learn.copy_page(page, folder)
    answered = nbformat.read(copy, as_version=4)
    answered.cells[1].source = "guess = 42"
    nbformat.write(answered, copy)
    assert learn.copy_page(page, folder) is None  # nothing new
    write(page, "guess = ...  # bytes")
    assert learn.copy_page(page, folder).name == "00_page.new.ipynb"
    assert learn.copy_page(page, folder) is None
    write(page, "guess = ...  # in bytes")
    assert learn.copy_page(page, folder).name == "00_page.new-2.ipynb"
    assert learn.copy_page(page, folder) is None
    assert sources(copy)[1] == "guess = 42" and sources(folder / "00_page.new.ipynb")[1] == "guess = ...  # bytes"


def test_other_outputs_are_no_other_page(page, tmp_path):
    learn.copy_page(page, tmp_path / "learn")
    notebook = nbformat.read(page, as_version=4)
    notebook.cells[1].outputs = []
    nbformat.write(notebook, page)
    assert learn.copy_page(page, tmp_path / "learn") is None


@pytest.mark.parametrize("content", ["", "[1]", "{}", json.dumps({"metadata": None})])
def test_a_file_of_that_name_that_is_no_copy_is_left_alone(page, tmp_path, content):
    (tmp_path / "learn").mkdir()
    own = tmp_path / "learn" / "00_page.ipynb"
    own.write_text(content)
    assert learn.copy_page(page, tmp_path / "learn").name == "00_page.new.ipynb"
    assert own.read_text() == content


@pytest.fixture
def lab(page, tmp_path, monkeypatch, capsys):
    """What `make lab` says, each time, of the pages that there are."""
    def run():
        monkeypatch.chdir(tmp_path)
        pages = sorted(str(path.relative_to(tmp_path)) for path in page.parent.glob("*.ipynb"))
        monkeypatch.setattr("sys.argv", ["learn.py", "--out", "learn", *pages])
        assert learn.main() == 0
        return capsys.readouterr().out.splitlines()
    return run


def answer(copy, source="guess = 42"):
    answered = nbformat.read(copy, as_version=4)
    answered.cells[1].source = source
    nbformat.write(answered, copy)
    return copy.read_bytes()


def test_the_command_copies_all_pages_and_says_which_copies_are_of_an_older_version(page, tmp_path, lab):
    assert lab() == lab() == []
    write(page, "guess = 1")
    assert lab() == ["learn/00_page.ipynb is of an older version: the page is now 00_page.new.ipynb"]
    assert lab() == []
    write(page, "guess = 2")
    assert lab() == [f"learn/{name}.ipynb is of an older version: the page is now 00_page.new-2.ipynb"
                     for name in ("00_page", "00_page.new")]


def renumbered(page, number, source="guess = ..."):
    """The page as it is after tools/pages.py: the number is in its name and its heading."""
    new = page.with_name(f"{number}_page.ipynb")
    page.rename(new)
    write(new, source + f"  # {number}")
    return new


def test_a_page_that_has_another_number_is_known_again(page, tmp_path, lab):
    lab()
    old = tmp_path / "learn" / "00_page.ipynb"
    answered = answer(old)
    page = renumbered(page, 22)
    assert lab() == ["learn/00_page.ipynb is of an older version: the page is now 22_page.ipynb"]
    assert lab() == [] and old.read_bytes() == answered
    assert {path.name for path in (tmp_path / "learn").glob("*.ipynb")} == {"00_page.ipynb", "22_page.ipynb"}
    renumbered(page, 23)
    assert lab() == [f"learn/{number}_page.ipynb is of an older version: the page is now 23_page.ipynb"
                     for number in ("00", "22")]


def test_a_copy_of_version_0_1_has_no_slug_and_is_known_by_its_name(page, tmp_path, lab):
    lab()
    old = tmp_path / "learn" / "00_page.ipynb"
    notebook = json.loads(old.read_text())
    del notebook["metadata"][learn.SLUG]
    old.write_text(json.dumps(notebook))
    assert lab() == []  # of this version it is the same, too
    renumbered(page, 22)
    assert lab() == ["learn/00_page.ipynb is of an older version: the page is now 22_page.ipynb"]


def test_another_page_of_the_old_number_is_another_page(page, tmp_path, lab):
    lab()
    renumbered(page, 22)
    write(page.with_name("00_other.ipynb"), "other")
    assert lab() == ["learn/00_page.ipynb is of an older version: the page is now 22_page.ipynb"]
    assert {path.name for path in (tmp_path / "learn").glob("*.ipynb")} == {
        "00_page.ipynb", "22_page.ipynb", "00_other.ipynb"}


def test_a_new_page_that_took_the_place_of_the_old_one_is_not_made_again(page, tmp_path, lab):
    lab()
    write(page, "guess = 1")
    lab()
    (tmp_path / "learn" / "00_page.ipynb").unlink()
    assert lab() == [] and not (tmp_path / "learn" / "00_page.ipynb").exists()


def test_a_copy_under_a_name_of_the_reader_s_own_is_theirs(page, tmp_path, lab):
    lab()
    mine = (tmp_path / "learn" / "00_page.ipynb").rename(tmp_path / "learn" / "mine.ipynb")
    answered = answer(mine)
    assert lab() == ["learn/mine.ipynb is of this version, under another name: the page is again 00_page.ipynb"]
    write(page, "guess = 1")
    assert lab() == [f"learn/{name}.ipynb is of an older version: the page is now 00_page.new.ipynb"
                     for name in ("00_page", "mine")]
    assert mine.read_bytes() == answered


def test_what_is_no_copy_is_said_to_be_none(page, tmp_path, lab):
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn" / "00_page.ipynb").write_text("mine")
    assert lab() == ["learn/00_page.ipynb is no copy that was made here: the page is 00_page.new.ipynb"]
    assert lab() == [] and (tmp_path / "learn" / "00_page.ipynb").read_text() == "mine"


def test_git_ignores_them_and_every_page_can_be_copied(tmp_path):
    assert "/learn/" in (ROOT / ".gitignore").read_text().splitlines()
    for each in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = learn.copy_page(each, tmp_path)
        assert sources(copy) == sources(each)


def test_a_copy_reaches_the_graders(tmp_path):
    link = tmp_path / "learn" / "exercises"
    for _ in range(2):
        learn.reach_graders(tmp_path / "learn")
        assert (link / "zero_3.py").exists() and (tmp_path / "learn" / "blanks" / "__init__.py").exists()
    link.unlink()
    link.symlink_to(tmp_path / "moved")  # a checkout that is elsewhere now
    learn.reach_graders(tmp_path / "learn")
    assert (link / "zero_3.py").exists()
