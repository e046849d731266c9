"""The start page of a reader's folder: every page, route and symptom, and a tick for what a grader found right."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl import catalog

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import start_page  # noqa: E402

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("notebooks/*.ipynb"))


@pytest.fixture(scope="module")
def learn(tmp_path_factory):
    """A reader's folder as `make lab` makes it."""
    folder = tmp_path_factory.mktemp("reader") / "learn"
    subprocess.run([sys.executable, "tools/learn.py", "--out", folder, *PAGES], cwd=ROOT, check=True)
    return folder


def text_of(folder):
    start_page.write(folder)
    return "\n".join(cell["source"] for cell in json.loads((folder / "INDEX.ipynb").read_text())["cells"])


def test_every_page_has_a_row_with_its_question_and_a_link_to_the_copy(learn):
    text = text_of(learn)
    for page in catalog.pages():
        assert f"[{page.name}]({page.filename})" in text and f"| {page.question} | {page.minutes} |" in text
    links = set(re.findall(r"\]\(([^)]+)\)", text))
    assert links == {page.filename for page in catalog.pages()} and all((learn / link).exists() for link in links)


def test_each_symptom_leads_to_pages_and_each_page_has_a_symptom_or_is_the_first():
    groups = start_page.start()["groups"]
    assert len(groups) == 4 and all(5 <= len(group["rows"]) <= 8 for group in groups)
    routes = {slug for route in start_page.start()["routes"] for slug in route["pages"]}
    named = {slug for group in groups for _, *slugs in group["rows"] for slug in slugs} | routes
    assert {page.slug for page in catalog.pages()} == named


def test_a_slug_that_no_page_has_and_a_part_without_a_title_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(start_page, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    found = (ROOT / "data" / "start.toml").read_text()
    for text, words in ((found.replace('"masks_in_tiles"', '"masks_in_tile"'), "names masks_in_tile: data/pages.toml"),
                        (found.replace('4 = "The allocator"', ""), "no part for 40 · Reserved is not allocated")):
        (tmp_path / "data" / "start.toml").write_text(text)
        start_page.start.cache_clear()
        with pytest.raises(ValueError, match=re.escape(words)):
            start_page.start()
    start_page.start.cache_clear()


def test_a_grader_ticks_what_is_right_and_nothing_else(tmp_path, monkeypatch, capsys):
    from exercises import where_the_memory_goes as page

    monkeypatch.chdir(tmp_path)
    page.first(lambda config: 0)
    page.third(lambda *args: None)
    assert list(tmp_path.iterdir()) == []  # no folder of a reader: nothing is written, here as in notebooks/
    start_page.write(tmp_path)
    before = (tmp_path / "INDEX.ipynb").read_bytes()
    page.first(lambda config: 0)
    assert (tmp_path / "INDEX.ipynb").read_bytes() == before and not (tmp_path / "progress.json").exists()

    def evaluate(model, tokens, targets):
        import torch

        with torch.no_grad():
            return model(tokens, targets)

    for _ in range(2):
        page.second(evaluate)
    assert json.loads((tmp_path / "progress.json").read_text()) == {"where_the_memory_goes": ["second"]}
    text = text_of(tmp_path)
    assert "**1 of " in text and text.count("☑") == 1 and "☐☑☐ |" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["INDEX.ipynb", "progress.json"]
    assert "right, on parity and bytes" in capsys.readouterr().out


@pytest.mark.parametrize("spoiled", ["", "[]", "{", '{"where_the_memory_goes": 3}', '{"no_page": ["first"]}'])
def test_a_spoiled_list_of_what_is_solved_counts_as_nothing(tmp_path, spoiled):
    (tmp_path / "progress.json").write_text(spoiled)
    assert "**0 of " in text_of(tmp_path)
    start_page.tick(tmp_path, "zero_3", "first")
    assert "**1 of " in text_of(tmp_path)


def test_exercises_are_those_that_graders_have():
    from exercises import zero_3

    assert start_page.exercises_of("zero_3") == ("first", "second") and start_page.exercises_of("no_page") == ()
    assert all(hasattr(zero_3, name) for name in start_page.exercises_of("zero_3"))
    assert sum(len(start_page.exercises_of(page.slug)) for page in catalog.pages()) >= 97


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        used = f"port {port} is in use"
        for words, said in ((["--port", str(port)], used), ([f"--port={port}"], used),
                            (["--port", "many"], "--port many: expected a number")):
            done = subprocess.run([sys.executable, "tools/lab.py", "learn", *words], cwd=ROOT, capture_output=True,
                                  text=True, env=os.environ)
            assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--port", "FREE"], ["--ServerApp.port=FREE", "--no-browser"]])
def test_jupyter_gets_one_port_and_the_line_says_it(words, monkeypatch, capsys):
    import lab

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [word.replace("FREE", str(port)) for word in words]
    begun = []
    monkeypatch.setattr(os, "execv", lambda _, command: begun.append(command))
    monkeypatch.setattr(sys, "argv", ["tools/lab.py", "learn", *words])
    monkeypatch.setenv("JUPYTER_TOKEN", "t")
    lab.main()
    said = capsys.readouterr().out
    ports = [word for word in begun[0] if "port=" in word or word == "--port"]
    assert said.count("\n") == 1 and len([word for word in ports if "retries" not in word]) == 1
    assert not words or f":{port}/lab/tree/learn/INDEX.ipynb?token=t " in said
