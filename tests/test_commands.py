"""The Makefile's set-up, and the tools behind `make notebooks` and `make gpu`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
import torch

ROOT = Path(__file__).parent.parent
MAKE = shutil.which("make")

# A python3 that is too old, and one that stands for a new one: `-m venv` gives a .venv whose pip does what the file
# `pip` says, and whose torch has the version in the file `torch`: a set-up takes no time and can be made to fail.
TOO_OLD = '#!/bin/sh\ncase "$2" in *sys.exit*) exit 1;; *) echo "is 3.9.18";; esac\n'
NEW = """#!/bin/sh
echo "$*" >>asked
case "$1 $2" in
  "-m venv") test "$3" = --clear && rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python";;
  "-m pip")  echo pip runs; exit $(cat pip);;
  "-c from"*) cat torch;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with what `make` reads before anything is installed, and a PATH without any real Python."""
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
        shutil.copy(path, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "cp", "id", "mkdir", "rm", "rmdir", "sed", "touch"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "torch").write_text(re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)[1])
    (tmp_path / "pip").write_text("0")
    return tmp_path


def make(checkout, *arguments, python=None):
    if python:
        script = checkout / "bin" / "python3"
        script.write_text(python)
        script.chmod(0o755)
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    return subprocess.run([MAKE, *arguments], cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("python", "found"), [(TOO_OLD, "python3 is 3.9.18"), (None, "python3 does not run")])
def test_without_a_new_python_one_line_says_so(checkout, python, found):
    done = make(checkout, "test", python=python)
    (line,) = (done.stdout + done.stderr).splitlines()
    assert done.returncode != 0
    assert "Python 3.11 or newer" in line
    assert found in line


def test_set_up_runs_once_and_again_only_when_it_must(checkout):
    stamp, pip = checkout / ".venv" / ".installed", checkout / "pip"

    def installs(*arguments):
        done = make(checkout, ".venv/.installed", *arguments, python=NEW)
        return done.returncode == 0, "pip runs" in done.stdout

    pip.write_text("1")
    assert installs() == (False, True)
    assert not stamp.exists(), "a failed set-up was taken as done"
    (checkout / ".venv" / "half-written").touch()
    pip.write_text("0")
    assert installs() == (True, True)
    assert not (checkout / ".venv" / "half-written").exists(), "a failed set-up was built upon"
    assert installs() == (True, False)
    assert installs("CONSTRAINTS=") == (True, True)
    assert installs() == (True, True)
    os.utime(checkout / "constraints.txt", (stamp.stat().st_mtime + 5,) * 2)
    pip.write_text("1")
    assert installs() == (False, True)
    assert not stamp.exists(), "a .venv whose renewal failed was taken as done"
    pip.write_text("0")
    assert installs() == (True, True)
    stamp.write_text("/another/checkout constraints.txt\n")
    assert installs() == (True, True), "a .venv copied from another checkout was taken as done"


def test_the_set_up_installs_what_the_constraints_name_and_looks_at_torchvision(checkout):
    make(checkout, ".venv/.installed", python=NEW)
    asked = [line for line in (checkout / "asked").read_text().splitlines() if not line.startswith("-c ")]
    pip = "-m pip install --no-compile -c constraints.txt"  # there is no uv here, so pip installs the rest, too
    assert asked == ["-m venv --clear .venv", f"{pip} torch torchvision uv", f"{pip} -e .[dev]", "tools/fit.py"]


@pytest.mark.parametrize(("variable", "words"), [
    ("VENV=precious", "precious is there, and no environment that make has made"),
    ("VENV=my env", "VENV=my env has a space in it"), ("CONSTRAINTS=none.txt", "CONSTRAINTS=none.txt: there is no")])
def test_no_folder_that_make_has_not_made_is_emptied(checkout, variable, words):
    for folder in ("precious", "my", "env"):
        (checkout / folder).mkdir()
        (checkout / folder / "thesis.txt").touch()
    name = variable.rpartition("=")[2] if variable.startswith("VENV") else ".venv"
    done = make(checkout, f"{name.replace(' ', '_')}/.installed", variable, python=NEW)
    assert done.returncode != 0 and words in done.stdout + done.stderr
    assert all((checkout / folder / "thesis.txt").exists() for folder in ("precious", "my", "env"))


def test_an_environment_of_the_user_s_own_is_installed_into_and_never_emptied(checkout):
    own = checkout / "own" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(NEW)
    own.chmod(0o755)
    (checkout / "pip").write_text("1")
    for expected in (False, True):
        done = make(checkout, "own/.installed", "VENV=own", python=NEW)
        assert (done.returncode == 0) is expected and "-m venv" not in (checkout / "asked").read_text()
        (checkout / "pip").write_text("0")


def test_a_set_up_without_a_network_says_what_to_do_and_leaves_nothing_that_counts(checkout):
    (checkout / "pip").write_text("1")
    done = make(checkout, "test", python=NEW)
    assert done.returncode != 0
    assert "Without a network pip finds no package: give it one" in done.stdout
    assert not (checkout / ".venv" / ".installed").exists() and (checkout / ".venv.unfinished").exists()
    (checkout / "pip").write_text("0")
    assert make(checkout, ".venv/.installed", python=NEW).returncode == 0
    assert not (checkout / ".venv.unfinished").exists()


def test_a_venv_whose_torch_was_replaced_is_set_up_again_and_says_so(checkout):
    assert make(checkout, ".venv/.installed", python=NEW).returncode == 0
    (checkout / "torch").write_text("2.99.0\n")
    done = make(checkout, ".venv/.installed", python=NEW)
    assert ".venv has torch 2.99.0, constraints.txt names 2.1" in done.stdout and "pip runs" in done.stdout
    (checkout / "torch").write_text("2.99.0\n")
    assert make(checkout, ".venv/.installed", "CONSTRAINTS=", python=NEW).returncode == 0
    assert "pip runs" not in make(checkout, ".venv/.installed", "CONSTRAINTS=", python=NEW).stdout


def test_each_version_has_a_venv_of_its_own(checkout):
    done = make(checkout, "-n", "test-versions", python=NEW)
    for venv, constraints in ((".venv-2.11", "constraints-2.11.txt"), (".venv-2.14", "constraints-2.14.txt")):
        assert f"make test VENV={venv} CONSTRAINTS={constraints}" in done.stdout


TARGETS = re.search(r"^\.PHONY: ((?:.+\\\n)*.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].replace("\\\n", "")


@pytest.fixture
def anywhere(checkout):
    """The checkout, in a folder whose name has what a shell reads otherwise."""
    folder = checkout / "it's a höuse, \"模型\" $x"
    files = list(checkout.iterdir())
    folder.mkdir()
    for path in files:
        path.rename(folder / path.name)
    return folder


@pytest.mark.parametrize("target", [*TARGETS.split(), ".venv/.installed"])
def test_each_command_reads_as_words_wherever_the_checkout_lies(anywhere, target):
    done = make(anywhere, "-n", "--no-print-directory", target, python=NEW)
    assert done.returncode == 0 and done.stderr == ""
    words = shlex.split(done.stdout, comments=True)
    runs = [word for word in words if word.startswith("PYTHONPATH=")]
    assert set(runs) <= {f"PYTHONPATH=tests/kits:{anywhere}"} and len(runs) == done.stdout.count("-p on_phantom")
    assert ("phantom" in target and target != "phantom-venv") == bool(runs)


def test_a_set_up_is_done_once_wherever_the_checkout_lies(anywhere):
    for expected in (True, False):
        done = make(anywhere, ".venv/.installed", python=NEW)
        assert done.returncode == 0 and ("pip runs" in done.stdout) is expected
    assert (anywhere / ".venv" / ".installed").read_text() == f"{anywhere} constraints.txt\n"


def test_a_python_that_is_named_may_lie_anywhere(anywhere):
    make(anywhere, "help", python=NEW)  # writes it
    named = anywhere / "bin" / "python of mine"
    (anywhere / "bin" / "python3").rename(named)
    said = "PYTHON=" + str(named).replace("$", "$$")  # as make has it
    assert shlex.split(make(anywhere, "-n", "gpu", said).stdout) == [str(named), "tools/gpu.py"]
    done = make(anywhere, "-n", "gpu", f"{said} too")
    assert done.returncode != 0 and "python of mine too' does not run" in done.stderr


@pytest.mark.parametrize(("fits", "aside"), [(True, False), (False, True)])
def test_a_torchvision_of_another_build_is_put_aside(tmp_path, fits, aside):
    """With packages that stand for torch and torchvision, and a pip that writes down what it is asked."""
    for name, text in (("torch", ""), ("torchvision", "" if fits else "raise RuntimeError('no operator nms')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(about)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(f"import sys; open({str(tmp_path / 'asked')!r}, 'a').write("
                                                  "' '.join(sys.argv[1:]) + '\\n')")
    done = run_tool("fit.py", PYTHONPATH=str(tmp_path))
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert done.returncode == 0, done.stderr
    assert ("torchvision 1.0 was not built for torch 1.0: it is left out" in done.stdout) == aside
    assert ("uninstall --yes torchvision\n" in asked) == ("torchvision==1.0" in asked) == aside


def test_ci_without_make_says_so(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    done = subprocess.run([shutil.which("bash"), ROOT / ".ci" / "run"], env={"PATH": str(tmp_path / "bin")},
                          capture_output=True, text=True)
    assert done.returncode != 0 and "make is not installed" in done.stderr


BESIDE = """
import time
from pathlib import Path

import pytest

def runs(name, seconds):
    start = time.monotonic()
    time.sleep(seconds)
    with open("ran", "a") as file:
        file.write(f"{name} {start} {time.monotonic()}\\n")
"""
IN_ONE_FILE = """
@pytest.mark.parametrize("i", range(10))
def test_short(i):
    runs("short", 0.1)
"""
IN_THE_OTHER = """
def test_beside():
    runs("beside", 0.3)

@pytest.mark.alone
def test_alone():
    runs("alone", 0.2)

@pytest.mark.alone
def test_late_once():
    runs("late", 0.1)
    assert Path("ran").read_text().count("late") == 2

@pytest.mark.alone
def test_slow():
    runs("slow", 0.1)
    assert False, "slow"

@pytest.mark.alone(only_rerun="Late")
def test_wrong():
    runs("wrong", 0)
    assert False, "wrong"
"""
ALONE = ("alone", "late", "slow", "wrong")


def in_two_workers(folder, *options):
    """Run test_a.py and test_b.py in the folder as `make test` does; return the output and [(name, start, end)]."""
    for name in ("Makefile", "pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "test_a.py").write_text(BESIDE + IN_ONE_FILE)
    (folder / "test_b.py").write_text(BESIDE + IN_THE_OTHER)
    workers = re.search(r"-n 2[-a-z ]+", (ROOT / "Makefile").read_text())[0].split()
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *workers, "-p", "no:cacheprovider", *options, "."]
    done = subprocess.run(command, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
                          cwd=folder, capture_output=True, text=True)
    ran = [line.split() for line in (folder / "ran").read_text().splitlines()]
    return done.stdout + done.stderr, [(name, float(start), float(end)) for name, start, end in ran]


def test_two_workers_run_tests_side_by_side_and_one_under_alone_by_itself(tmp_path):
    output, spans = in_two_workers(tmp_path)
    assert "12 passed" in output and "3 failed" in output, output

    def beside(which):
        (_, start, end), = (span for span in spans if span[0] == which)
        return [name for name, other_start, other_end in spans if other_start < end and start < other_end]

    assert "short" in beside("beside") and beside("alone") == ["alone"]
    assert max(end for name, _, end in spans if name in ALONE) < min(
        start for name, start, _ in spans if name == "beside"), "those under `alone` are first"


def test_a_reading_under_alone_that_misses_is_taken_twice_more_and_alone_again(tmp_path):
    pytest.importorskip("pytest_rerunfailures")
    output, spans = in_two_workers(tmp_path, "-p", "rerunfailures", "--junit-xml=read.xml")
    times = Counter(name for name, _, _ in spans)
    assert {name: times[name] for name in ALONE} == {"alone": 1, "late": 2, "slow": 3, "wrong": 1}
    assert re.search("2 failed, 13 passed, 3 rerun in", output), output
    assert re.findall(r"^RERUN test_b.py::(\w+)", output, re.MULTILINE) == ["test_late_once", "test_slow", "test_slow"]
    suite = ElementTree.parse(tmp_path / "read.xml").find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("15", "2", "0")
    for name, start, end in spans:
        if name in ALONE:
            assert not [other for other, begin, until in spans if begin < end and start < until and other != name]


def run_tool(name, *arguments, **environment):
    command = [sys.executable, ROOT / "tools" / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_notebooks_are_run_and_a_failing_one_names_its_cell(tmp_path):
    cells = {"good": ["1 + 1"], "bad": ["x = 1", "raise ValueError(f'x is {x}')"]}
    for name, sources in cells.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    done = run_tool("notebooks.py", "--out", tmp_path / "out", tmp_path / "bad.ipynb", tmp_path / "good.ipynb")
    assert done.returncode == 1
    assert "cell 1: " in done.stdout
    assert "ValueError: x is 1" in done.stdout
    assert "FAILED: bad.ipynb" in done.stdout.splitlines()[-1]
    (good,) = nbformat.read(tmp_path / "out" / "good.ipynb", as_version=4).cells
    assert good.outputs[0].data["text/plain"] == "2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_says_in_one_line_that_there_is_none():
    done = run_tool("gpu.py", REFIMPL_ALLOW_CPU="0")
    (line,) = (done.stdout + done.stderr).splitlines()
    assert done.returncode != 0
    assert "no GPU was found" in line


@pytest.mark.skipif(shutil.which("bmake") is None, reason="there is no BSD make (Debian: apt install bmake)")
def test_bsd_make_says_gmake_and_does_nothing():
    done = subprocess.run(["bmake", "-f", "BSDmakefile", "lab"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr.splitlines()[0].endswith("run gmake lab")


def test_the_makefile_has_no_function_that_gnu_make_3_81_lacks():
    """macOS has 3.81 of 2006: no `$(file …)`, `$(let …)`, `!=`, `undefine`, `.ONESHELL`, `::=`, grouped targets."""
    text = (ROOT / "Makefile").read_text()
    assert not re.search(r"\$\((file|let|intcmp|guile) |^\S+ *(!=|::=)|^undefine|^\.ONESHELL|&:", text, re.MULTILINE)
