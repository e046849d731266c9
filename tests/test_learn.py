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


def test_the_command_copies_all_pages_and_says_what_has_changed(page, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "learn"
    monkeypatch.setattr("sys.argv", ["learn.py", "--out", str(folder), str(page)])
    assert learn.main() == 0 and capsys.readouterr().out == ""
    write(page, "guess = 1")
    learn.main()
    said = f"{page} has changed since you began {folder / '00_page.ipynb'}: the new page is"
    assert said in capsys.readouterr().out


def test_git_ignores_them_and_every_page_can_be_copied(tmp_path):
    assert "/learn/" in (ROOT / ".gitignore").read_text().splitlines()
    for each in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = learn.copy_page(each, tmp_path)
        assert sources(copy) == sources(each)


def test_a_copy_reaches_the_graders(tmp_path):
    link = tmp_path / "learn" / "exercises"
    for _ in range(2):
        learn.reach_exercises(tmp_path / "learn")
        assert (link / "zero_3.py").exists()
    link.unlink()
    link.symlink_to(tmp_path / "moved")  # a checkout that is elsewhere now
    learn.reach_exercises(tmp_path / "learn")
    assert (link / "zero_3.py").exists()
