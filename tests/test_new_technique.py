"""The template of a technique, written into a copy of the tree: its tests pass there, and notice what saves nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = {".git", "build", "learn", "site", "recordings", "minimalloc", "__pycache__"}
NAME = "zz_toy_9"  # behind all others in each order
AROUND = ["tests/test_folders.py", "tests/test_architecture.py", "tests/test_contributing.py",
          "tests/test_floors.py::test_imports_go_down", "tests/test_pages.py",
          "tests/test_floors.py::test_each_paper_has_its_line_in_the_order_of_reading",
          "tests/test_readme.py::test_every_notebook_has_a_row", "tests/test_readme.py::test_links_lead_somewhere",
          "tests/test_readme.py::test_a_technique_is_a_short_row_that_leads_to_its_figures", "tests/test_start_page.py",
          "tests/test_catalog.py::test_the_course_is_whole_without_its_elective_pages",
          "tests/test_tiers.py::test_the_core_has_each_technique_s_paper_and_two_of_its_tests"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout."""
    copy = tmp_path_factory.mktemp("tree") / "copy"

    def left_out(folder, names):
        return {each for each in names if each in LEFT_OUT or each.startswith(".venv")}

    return Path(shutil.copytree(ROOT, copy, ignore=left_out))


def run(tree, *command):
    paths = os.pathsep.join(str(tree / each) for each in (".", "tests/kits", "notebooks"))
    return subprocess.run([sys.executable, *command], cwd=tree, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths})


def passed(tree, *arguments):
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    return done.returncode == 0, done.stdout + done.stderr


def files(tree):
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


@pytest.mark.parametrize(("arguments", "words"), [
    (["mlp"], "mlp exists: there is refimpl/mlp"), (["model"], "model exists: there is refimpl/model.py"),
    (["meter"], "meter exists: there is refimpl/papers/meter.py"), (["zero_3"], "zero_3 exists: "),
    (["no-name"], "'no-name' is no name of a package"), (["class"], "'class' is no name of a package"),
    (["Capital"], "'Capital' is no name of a package"), (["../out"], "'../out' is no name of a package"),
    (["a" * 25], "has 25 letters: expected at most 24"),
    (["free", "--after", "nowhere"], "--after nowhere: expected a page of data/pages.toml")])
def test_bad_input_is_one_sentence_and_nothing_is_written(tree, arguments, words):
    before = files(tree)
    done = run(tree, "tools/new_technique.py", *arguments)
    assert done.returncode == 1 and done.stdout == "" and words in done.stderr and done.stderr.count("\n") == 1
    assert files(tree) == before


def test_all_is_as_it_was_if_the_last_step_fails(tree):
    tool = tree / "tools" / "pages.py"
    text, before = tool.read_text(), files(tree)
    tool.write_text("import sys\nsys.exit('no')\n")
    done = run(tree, "tools/new_technique.py", NAME)
    tool.write_text(text)
    assert done.returncode == 1 and done.stderr == "nothing was written: tools/pages.py says: no\n"
    assert files(tree) == before and not (tree / "refimpl" / NAME).exists()


@pytest.fixture(scope="module")
def written(tree):
    done = run(tree, "tools/new_technique.py", NAME)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert all((tree / path).is_file() for path in done.stdout.split()) and len(done.stdout.split()) == 19
    return tree


def test_its_tests_pass_and_ruff_too(written):
    (page,) = (written / "notebooks").glob(f"*_{NAME}.ipynb")
    ours = [f"tests/{NAME}", f"tests/exercises/test_{NAME}.py", f"tests/blanks/test_{NAME}.py",
            "tests/test_blanks.py", page]
    fine, said = passed(written, "--nbval", "--nbval-current-env", *ours)
    assert fine, said
    done = run(written, "-m", "ruff", "check", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_what_holds_the_house_together_agrees(written):
    fine, said = passed(written, *AROUND)
    assert fine, said


def test_another_one_stands_behind_another_page(written):
    done = run(written, "tools/new_technique.py", "another", "--after", "ranks_and_collectives")
    assert done.returncode == 0, done.stderr
    (page,), (before,) = ([*written.glob(f"notebooks/*_{slug}.ipynb")] for slug in ("another", "ranks_and_collectives"))
    assert page.name.partition("_")[0] == before.name.partition("_")[0] + "a"  # the next number is taken
    fine, said = passed(written, "tests/another", "tests/exercises/test_another.py", *AROUND[:2])
    assert fine, said


def test_a_version_that_saves_nothing_fails(written):
    path = written / "refimpl" / NAME / f"{NAME}.py"
    text = path.read_text()
    path.write_text(text.replace("return SiLU.apply(x)", "return x * torch.sigmoid(x)"))
    fine, said = passed(written, f"tests/{NAME}/test_{NAME}.py::test_bytes_are_the_closed_form",
                        f"tests/{NAME}/test_{NAME}.py::test_numbers_are_the_plain_ones")
    path.write_text(text)
    assert not fine and "2 failed, 1 passed" in said
