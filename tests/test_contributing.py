"""CONTRIBUTING.md, CITATION.cff and the issue forms: what they name is there, and the commands are ones that run."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from refimpl import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
LATER = {"my_technique"}  # what a command of the page makes


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_the_files_that_it_names_are_there():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    named = re.findall(r"(?:`|\s)((?:refimpl|tests|tools|data|notebooks|docs)/[\w./-]*)", TEXT)
    assert len(named) > 15
    for path in [*links, *named]:
        assert LATER & set(re.split(r"[/.]|test_", path)) or (ROOT / path.rstrip(".")).exists(), path


def test_its_make_targets_are_there():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make (test[\w-]*)", TEXT))
    for target in targets:
        assert re.search(rf"^[\w. -]*\b{target}(?: [\w. -]+)?:", makefile, re.MULTILINE), target


def test_the_citation_agrees_with_the_project():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == PROJECT["version"] and found["license"] == PROJECT["license"]
    assert found["authors"] == PROJECT["authors"] and found["cff-version"] == "1.2.0"
    assert found["message"] and found["title"].startswith("refimpl")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_takes(path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() == {"name", "description", "title", "body"}
    names = [field["id"] for field in form["body"]]
    assert len(names) == len({*names}) and all(field["attributes"]["label"] for field in form["body"])
    assert {field["type"] for field in form["body"]} <= {"textarea", "input"}


def test_a_bug_comes_with_what_explain_sees_and_with_versions(capsys):
    said = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert [path.stem for path in FORMS] == ["bug", "question"] and "torch.__version__" in said
    for text in (said, TEXT):
        assert "refimpl explain --out report train.py" in text and "report/explain.json" in text
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    assert "explain.html, .png and .json" in " ".join(capsys.readouterr().out.split())
