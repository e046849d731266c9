"""The tool that gives files small faults: which faults there are, what is drawn, what is noticed, what is refused."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
_spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
mutants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)

SOURCE = '''"""Ünïcode before what is changed."""


def total(x, y, twice=False, n=3):
    if x < y and not twice:  # · a comparison after letters of two bytes
        handle.remove()
        cache.clear()
        log(x)
        del x
        self.kept = None
    if n is not None:
        raise ValueError(f"{n + 1} of {x}")
    return y * n + f(x, y)
'''
KINDS = {"a comparison": {"< → <=", "is not → is"}, "a condition": {"and → or", "not twice → (twice)"},
         "a default": {"False → True", "3 → 6"}, "a hook left": {"handle.remove() → pass"},
         "memory kept": {"cache.clear() → pass", "del x → pass", "self.kept = None → pass"},
         "a dropped call": {"log(x) → pass"}, "arithmetic": {"* → +", "+ → -"}, "swapped arguments": {"x, y → y, x"}}


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "refimpl" / "a.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return mutants.mutants_of(path, tmp_path)


def test_each_kind_of_fault_is_found_and_words_are_not(found):
    by_kind = {kind: {each.change for each in found if each.kind == kind} for kind in {each.kind for each in found}}
    assert by_kind == KINDS


def test_a_fault_changes_its_place_alone(found):
    source = SOURCE.encode()
    for each in found:
        changed = each.of(source)
        ast.parse(changed)
        assert changed != source and changed.startswith(source[: each.start])
        assert changed.endswith(source[each.end :]) and source[each.start : each.end].decode() == each.old
        assert SOURCE.splitlines()[each.line - 1].strip() == each.text


def test_every_fault_of_the_package_can_be_read_by_python():
    for path in sorted((ROOT / "refimpl" / "zero").glob("*.py")):
        source = path.read_bytes()
        for each in mutants.mutants_of(path, ROOT):
            ast.parse(each.of(source))


def test_a_draw_is_the_same_each_time_and_takes_all_packages_and_kinds():
    files = mutants.files_of([])
    drawn = mutants.draw(files, 300, 1)
    assert drawn == mutants.draw(files, 300, 1) != mutants.draw(files, 300, 2)
    assert 285 <= len(drawn) <= 320 and len({each.name for each in drawn}) == len(drawn)
    assert {mutants.package_of(each.file) for each in drawn} == {
        mutants.package_of(path.relative_to(ROOT).as_posix()) for path in files}
    rest = {each.name for each in mutants.draw([path for path in files if path.name != "autocast.py"], 300, 1)}
    gone = [each for each in drawn if each.name not in rest and not each.file.endswith("/autocast.py")]
    assert len(gone) <= 3, "what is drawn stays drawn, but for the last of a package that is smaller now"
    assert set(Counter(each.kind for each in drawn)) == {*KINDS, "off by one"}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one file, of whose lines the tests notice one."""
    for name, text in (("refimpl/__init__.py", ""), ("refimpl/x/__init__.py", ""),
                       ("refimpl/x/a.py", "def f(n):\n    return n + 1\n\n\ndef g(x):\n    return x < 0\n"),
                       ("tests/x/test_a.py", "from refimpl.x.a import f\n\n\ndef test_f():\n    assert f(2) == 3\n"),
                       ("tests/mutants.toml", "equivalent = []\n"), (".gitignore", "build\n__pycache__\n"),
                       ("conftest.py", "def pytest_addoption(parser):\n    parser.addoption('--tier')\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def run(checkout, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mutants.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        mutants.main()
    return done.value.code


def test_what_tests_notice_and_what_lives(checkout, monkeypatch, capsys):
    assert run(checkout, monkeypatch, checkout / "refimpl" / "x" / "a.py", "--count", 9) == 1
    said = capsys.readouterr().out
    verdicts = [*map(json.loads, next((checkout / "build" / "mutants").iterdir()).read_text().splitlines())]
    notices, none = "tests/x/test_a.py::test_f", None
    assert {(name.partition(": ")[2], tier, test) for name, tier, test, _ in verdicts} == {
        ("+ → -", "push", notices), ("1 → 2", "push", notices),
        *((change, tier, none) for change in ("< → <=", "0 → 1") for tier in ("push", "all"))}
    assert said.count("lived: ") == 2 and "return x < 0" in said
    assert (checkout / "refimpl" / "x" / "a.py").read_text().count("n + 1") == 1

    with monkeypatch.context() as once:
        once.setattr(mutants, "who_notices", lambda *_: pytest.fail("this was tried before"))
        assert run(checkout, monkeypatch, "--count", 9) == 1  # goes on where it was

    (checkout / "tests" / "x" / "test_g.py").write_text(
        "from refimpl.x.a import g\n\n\ndef test_g():\n    assert g(0) is False\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["add", "-A"], ["commit", "-qm", "a test for what lived"]):
        subprocess.run([*git, *command], check=True)
    assert run(checkout, monkeypatch, "--count", 9) == 0

    path = checkout / "refimpl" / "x" / "a.py"
    path.write_text("# a line more\n" + path.read_text())
    subprocess.run([*git, "commit", "-qam", "another package"], check=True)
    first = {}
    with monkeypatch.context() as once:
        once.setattr(mutants, "who_notices",
                     lambda mutant, copy, selection, sound, before: first.setdefault(mutant.change, before))
        run(checkout, monkeypatch, "--count", 9)
    assert first == {"+ → -": notices, "1 → 2": notices, "< → <=": "tests/x/test_g.py::test_g",
                     "0 → 1": "tests/x/test_g.py::test_g"}


def test_who_noticed_is_kept_in_the_tree_and_comes_first_in_another_checkout(checkout, monkeypatch):
    notices = "tests/x/test_a.py::test_f"
    monkeypatch.setattr(mutants, "who_notices", lambda mutant, *_: None if mutant.new == "2" else notices)
    assert run(checkout, monkeypatch, "--count", 9, "--record") == 1
    lines = (checkout / "tests" / "mutants.jsonl").read_text().splitlines()
    faults = "a comparison: < → <=", "arithmetic: + → -", "off by one: 0 → 1"
    assert [json.loads(line) for line in lines] == [[f"refimpl/x/a.py {fault}", notices] for fault in faults]
    shutil.rmtree(checkout / "build")
    assert mutants.who_noticed() == dict(map(json.loads, lines))


def test_faults_that_change_nothing_are_left_out(checkout, monkeypatch):
    (checkout / "tests" / "mutants.toml").write_text("".join(
        f'[[equivalent]]\nfile = "refimpl/x/a.py"\ntext = "return x < 0"\nchange = "{change}"\nreason = "a toy"\n'
        for change in ("< → <=", "0 → 1")))
    subprocess.run(["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"],
                   check=True)
    assert run(checkout, monkeypatch, "--count", 9) == 0


def test_bad_input_is_one_sentence_and_nothing_is_written(checkout, monkeypatch):
    path = checkout / "refimpl" / "y" / "b.py"
    path.parent.mkdir()
    path.write_text("x = 1\n")
    assert "there are no tests beside it" in run(checkout, monkeypatch, path)
    assert "expected a file or folder of refimpl/" in run(checkout, monkeypatch, checkout / "tests")
    (checkout / "refimpl" / "x" / "a.py").write_text("def f(n):\n    return n\n")
    assert "commit them" in run(checkout, monkeypatch)
    assert not (checkout / "build").exists()


def test_a_test_that_hangs_has_noticed(checkout):
    (checkout / "tests" / "x" / "test_a.py").write_text("import time\n\n\ndef test_f():\n    time.sleep(60)\n")
    assert mutants.first_failure(["tests/x/test_a.py::test_f"], checkout, 3) == "it hangs"


def test_a_test_that_fails_without_a_fault_has_not_noticed_one(checkout, monkeypatch):
    (checkout / "tests" / "x" / "test_a.py").write_text("def test_f():\n    assert False\n")
    subprocess.run(["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"],
                   check=True)
    assert "test_f fails without a fault: mend that first" in run(checkout, monkeypatch, "--count", 9)


def test_the_listed_faults_exist():
    for file, text, change in mutants.equivalents():
        assert any((each.text, each.change) == (text, change) for each in mutants.mutants_of(ROOT / file, ROOT)), text
