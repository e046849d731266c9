"""data/pages.toml is the one place that has a page's number and title: what names a page agrees, and follows."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from refimpl import catalog

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

TITLES = {"first_words": "First words", "second": "Is it second?", "third": "Third", "fourth": "Fourth"}
ENDS = {"first_words": "Next: [21 · Is it second?](21_second.ipynb)",
        "second": "Before: [20 · First words](20_first_words.ipynb). Next: [22 · Third](22_third.ipynb), short.",
        "third": "Sources. Before: [21 · Is it second?](21_second.ipynb). Next: [30 · Fourth](30_fourth.ipynb).",
        "fourth": "Before: [22 · Third](22_third.ipynb)"}
WORDS = "words " * 980  # ten minutes
FACTS = {"first_words": "**Core** · 10 minutes · needs no other page · next: [21 · Is it second?](21_second.ipynb)",
         "second": "**Core** · 10 minutes · needs no other page · next: [22 · Third](22_third.ipynb)",
         "third": "**Core** · 10 minutes · needs no other page · next: [30 · Fourth](30_fourth.ipynb)",
         "fourth": "**Core** · 10 minutes · needs no other page"}


def table(titles=TITLES, **numbers):
    """The pages, those of which a number is given with that one, in its order."""
    numbers = {"first_words": "20", "second": "21", "third": "22", "fourth": "30"} | numbers
    return [catalog.Page(slug, number, titles[slug], "Why?", 10, True, ())
            for slug, number in sorted(numbers.items(), key=lambda each: each[1])]


PAGES, MOVED = table(), table(second="22", third="21")
FIRST, SECOND, *_ = PAGES


def cell(kind, source, **more):
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)} | more


@pytest.fixture
def root(tmp_path):
    """A course of four pages, with all that names a page."""
    for folder in ("notebooks/exercises", "docs", "tests", "refimpl"):
        (tmp_path / folder).mkdir(parents=True)
    for page in PAGES:
        write(tmp_path, page, WORDS + "\n\n" + ENDS[page.slug])
    (tmp_path / "README.md").write_text(
        "| x | [22 · Third](notebooks/22_third.ipynb), after [21 · Is it second?](notebooks/21_second.ipynb#why) |\n"
        "Begin with [20](notebooks/20_first_words.ipynb). On pages 20 to 22, on page\n22, and on 22 GPUs.\n")
    (tmp_path / "docs" / "how.md").write_text("on [page 21](../notebooks/21_second.ipynb), Pages 21 and 22, page 22's")
    (tmp_path / "tests" / "costs.json").write_text(
        '{\n"notebooks/20_first_words.ipynb": [1.0, 2],\n"notebooks/21_second.ipynb": [2.0, 2],\n'
        '"notebooks/22_third.ipynb": [3.0, 2],\n"tests/test_b.py::test": [4, 1],\n"tests/test_a.py::test": [5, 1]\n}\n')
    return tmp_path


def write(root, page, text, code="# as on page 21\nprint(22)", output="22 as on page 22\n"):
    cells = [cell("markdown", f"# {page.name}\n\n{FACTS[page.slug]}\n\nWhy?"), cell("markdown", text),
             cell("code", code, outputs=[{"output_type": "stream", "name": "stdout", "text": [output]}])]
    (root / "notebooks" / page.filename).write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n")


def said(root, pages=PAGES):
    found = tool.Course(root, pages)
    return "\n".join([*found.differences(), *found.problems])


def test_all_that_names_a_page_agrees_with_the_table():
    done = subprocess.run([sys.executable, ROOT / "tools" / "pages.py", "--check"], capture_output=True, text=True)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_a_push_always_runs_pages_that_there_are_and_that_are_core():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"]["push"]
    assert all(catalog.page(slug).core for slug in settings["core_pages"])


def test_every_page_has_its_graders():
    modules = {path.stem for path in (ROOT / "notebooks" / "exercises").glob("[!_]*.py")}
    assert {page.slug for page in catalog.pages()} <= modules


def test_two_pages_change_places_by_one_edit_and_one_run(root):
    assert said(root) == ""
    before = {path: path.read_text() for path in root.rglob("*.*") if path.is_file()}
    found = tool.Course(root, MOVED)
    assert not found.problems and {path: path.read_text() for path in before} == before  # so far nothing is written
    assert "notebooks/21_second.ipynb is notebooks/22_second.ipynb in the table" in list(found.differences())
    found.write()
    assert sorted(path.name for path in root.glob("notebooks/*.ipynb")) == [page.filename for page in MOVED]
    assert (root / "README.md").read_text() == (
        "| x | [21 · Third](notebooks/21_third.ipynb), after [22 · Is it second?](notebooks/22_second.ipynb#why) |\n"
        "Begin with [20](notebooks/20_first_words.ipynb). On pages 20 to 21, on page\n21, and on 22 GPUs.\n")
    assert ((root / "docs" / "how.md").read_text()
            == "on [page 22](../notebooks/22_second.ipynb), Pages 22 and 21, page 21's")
    costs = json.loads((root / "tests" / "costs.json").read_text())
    assert list(costs.items()) == [
        ("notebooks/20_first_words.ipynb", [1.0, 2]), ("notebooks/21_third.ipynb", [3.0, 2]),
        ("notebooks/22_second.ipynb", [2.0, 2]), ("tests/test_b.py::test", [4, 1]), ("tests/test_a.py::test", [5, 1])]
    notebook = json.loads((root / "notebooks" / "22_second.ipynb").read_text())
    heading, text, code = notebook["cells"]
    facts = "**Core** · 10 minutes · needs no other page · next: [30 · Fourth](30_fourth.ipynb)\n"
    assert heading["source"] == ["# 22 · Is it second?\n", "\n", facts, "\n", "Why?"]
    assert text["source"][-1] == "Before: [21 · Third](21_third.ipynb). Next: [30 · Fourth](30_fourth.ipynb), short."
    assert code["source"] == ["# as on page 22\n", "print(22)"] and code["outputs"][0]["text"] == ["22 as on page 21\n"]


@pytest.mark.parametrize("pages", [
    MOVED, table(first_words="20a"), table(second="31", third="32", fourth="33"), table(third="21a", second="21"),
    table({**TITLES, "second": r"Not \1"})])
def test_a_run_ends_in_agreement_and_the_next_one_changes_nothing(root, pages):
    tool.Course(root, pages).write()
    assert said(root, pages) == ""
    before = {path: path.read_text() for path in root.rglob("*.*") if path.is_file()}
    again = tool.Course(root, pages)
    again.write()
    assert not again.changes and not again.renamed
    assert {path: path.read_text() for path in root.rglob("*.*") if path.is_file()} == before
    assert f"after [{again.by_slug['second'].name}](notebooks/" in (root / "README.md").read_text()


@pytest.mark.parametrize("there", ["", "**Elective** · 99 minutes\n\n"])
def test_the_facts_below_a_title_are_those_of_the_table(root, there):
    path = root / "notebooks" / SECOND.filename
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] = f"# 21 · Is it second?\n\n{there}Why?".splitlines(keepends=True)
    path.write_text(json.dumps(notebook))
    pages = [replace(page, core=False, needs=("first_words",)) if page.slug == "third" else page for page in PAGES]
    tool.Course(root, pages).write()
    heads = {page.slug: "".join(json.loads((root / "notebooks" / page.filename).read_text())["cells"][0]["source"])
             for page in pages}
    assert heads["third"] == ("# 22 · Third\n\n**Elective** · 10 minutes · needs [20](20_first_words.ipynb) · "
                              "next: [30 · Fourth](30_fourth.ipynb)\n\nWhy?")
    assert heads["second"].count("**Core** · 10 minutes") == 1 and "99" not in heads["second"]


def test_what_a_notebook_has_beside_words_stays_to_the_byte(root):
    path = root / "notebooks" / FIRST.filename
    before = json.loads(path.read_text())
    before["cells"][2]["outputs"].append({"output_type": "display_data", "metadata": {}, "data": {
        "image/png": "iVBORw0 page 21 20_first_words", "text/plain": ["<Figure of page 21>"]}})
    path.write_text(json.dumps(before, indent=1, ensure_ascii=False) + "\n")
    tool.Course(root, MOVED).write()
    after = json.loads(path.read_text())
    assert after["cells"][2]["outputs"][1]["data"] == {"image/png": "iVBORw0 page 21 20_first_words",
                                                       "text/plain": ["<Figure of page 22>"]}


@pytest.mark.parametrize(("change", "words"), [
    (lambda root: write(root, FIRST, WORDS + "[20](20_other.ipynb) " + ENDS["first_words"]),
     "notebooks/20_first_words.ipynb: [20](20_other.ipynb) leads to a page that data/pages.toml does not have"),
    (lambda root: write(root, FIRST, WORDS + "page 77. " + ENDS["first_words"]),
     "notebooks/20_first_words.ipynb: page 77 is none of data/pages.toml"),
    (lambda root: write(root, SECOND, WORDS + ENDS["first_words"]),
     "notebooks/21_second.ipynb: expected one link after each of ['Before', 'Next'], it has them after ['Next']"),
    (lambda root: write(root, FIRST, WORDS + ENDS["second"]),
     "expected one link after each of ['Next'], it has them after ['Before', 'Next']"),
    (lambda root: write(root, FIRST, "words " * 3000 + ENDS["first_words"]),
     "words, code and exercises take 30 minutes; the table says 10"),
    (lambda root: (root / "notebooks" / FIRST.filename).unlink(),
     "data/pages.toml has first_words: there is no notebooks/20_first_words.ipynb"),
    (lambda root: (root / "notebooks" / "23_new.ipynb").write_text("{}"),
     "notebooks/23_new.ipynb is not in data/pages.toml"),
    (lambda root: (root / "notebooks" / "23_third.ipynb").write_text("{}"),
     "notebooks/22_third.ipynb and notebooks/23_third.ipynb are one page: remove one"),
    (lambda root: (root / "README.md").write_text("[20 · First](notebooks/20_first_words.ipynb)\n"),
     "README.md: '[20 · First](notebooks/20_first_words.ipynb)' does not agree with the table, which makes it '[20 ·"),
    (lambda root: (root / "README.md").write_text("[21 · Third](notebooks/21_third.ipynb)\n"), "does not agree")])
def test_what_does_not_agree_is_said(root, change, words):
    change(root)
    assert words in said(root)


@pytest.mark.parametrize(("file", "line"), [
    ("refimpl/a.py", '"""As on page 20."""'), ("tests/test_a.py", "# Pages 20 and 21"),
    ("refimpl/b/c.py", 'see("notebooks/21_second.ipynb")'), ("tests/costs.toml", 'glob = "notebooks/22_*"'),
    ("Makefile", "PLAIN = notebooks/20_first_words.ipynb"), ("pyproject.toml", '"20_first_words"')])
def test_a_number_that_is_typed_in_code_is_found(root, file, line):
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"one\n{line}\n")
    assert f"{file}: line 2 names a page by its number, " in said(root)


@pytest.mark.parametrize("line", [
    "second", "a page of 20 lines", "pages = 20", "20_000", "first_words.ipynb", "notebooks/00_toy.ipynb", "page 2"])
def test_what_is_no_number_of_a_page_is_left_alone(root, line):
    (root / "refimpl" / "a.py").write_text(line)
    assert said(root) == ""


def test_the_command_writes_and_says_what_it_did(root, monkeypatch, capsys):
    monkeypatch.setattr(tool, "ROOT", root)
    monkeypatch.setattr(catalog, "pages", lambda: table({**TITLES, "second": "Other"}))
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    assert tool.main() == 1 and "does not agree" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["pages.py"])
    assert tool.main() == 0 and "README.md: " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    assert tool.main() == 0 and capsys.readouterr().out == ""


def test_a_table_that_is_wrong_is_said_in_a_line(monkeypatch, capsys):
    def wrong():
        raise ValueError("page 'x': 'number' is missing")
    monkeypatch.setattr(catalog, "pages", wrong)
    monkeypatch.setattr("sys.argv", ["pages.py"])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert capsys.readouterr().err.endswith("data/pages.toml: page 'x': 'number' is missing\n")
