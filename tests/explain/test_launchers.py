"""A module, and what launchers start: each finds what it would find without `explain`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from refimpl.explain import Explanation, Script, check, run
from refimpl.explain.launchers import program

ROOT = Path(__file__).parents[2]
TRAIN = """
import os, sys, torch
from {beside} import batch
said = sys.argv[1:], sys.path[0], __name__, __package__, os.environ.get("ACCELERATE_MIXED_PRECISION"), \\
    os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.path.basename(sys.argv[0])
print(said)
def main():  # as a command of Lightning's: `fit`, and a loop with a closure
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    def closure():
        optimizer.zero_grad()
        loss = model(batch()).sum()
        loss.backward()
        return loss
    for _ in range(9):
        optimizer.step(closure)
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "tool"  # as where pip installs
    folder.mkdir(parents=True)
    for path, beside in ((folder / "cli.py", ".data"), (folder / "__main__.py", ".data"),
                         (tmp_path / "train.py", "data")):
        path.write_text(TRAIN.format(beside=beside))
        (path.parent / "data.py").write_text("import torch\ndef batch():\n    return torch.randn(1024, 8)\n")
    (folder / "__init__.py").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tool", "data", "train")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def ran(words, is_module, capsys):
    made = run(program(words, is_module))
    assert made.done, made.ending.text
    return eval(capsys.readouterr().out.splitlines()[0]), made


@pytest.mark.parametrize(("name", "file"), [("tool.cli", "cli.py"), ("tool", "__main__.py")])
def test_a_module_is_main_as_python_m_has_it(project, capsys, monkeypatch, name, file):
    sites = project / "env" / "lib" / "python3.11" / "site-packages"
    monkeypatch.chdir(sites)
    argv, search = sys.argv, sys.path[:]
    said, made = ran([name, "--", "fit", "--", "--rows"], True, capsys)
    assert said == (["fit", "--", "--rows"], str(sites), "__main__", "tool", None, None, None, file)
    assert made.name == name and (sys.argv, sys.path) == (argv, search)
    lines = {str(record.line) for record in made.recording.trace.records if record.op == "randn"}
    assert lines == {"tool/data.py:3"}, "its own, though it lies among libraries"


def test_a_module_that_is_not_there_is_said(project):
    with pytest.raises(FileNotFoundError, match="no module nothing.at.all: expected one that `python -m` finds"):
        program(["nothing.at.all"], True)
    assert run(program(["json.nothing"], True)).ending.text == "json.nothing is no module that `python -m` can run\n"


def test_accelerate_s_launcher_sets_what_it_would(project, capsys):
    before = dict(os.environ)
    said, made = ran(["accelerate", "launch", "--cpu", "--mixed_precision", "bf16", "--num_processes", "2", "train.py",
                      "--x"], False, capsys)
    assert said == (["--x"], str(project), "__main__", None, "bf16", None, None, "train.py")
    assert Explanation(made).notes[0].startswith("one rank of 2 is read") and dict(os.environ) == before


def test_torchrun_s_first_rank_is_there_alone(project, capsys):
    said, made = ran(["torchrun", "--nproc-per-node", "4", "--nnodes", "2", "train.py", "x"], False, capsys)
    assert said[0] == ["x"] and said[5:7] == ("0", "1") and made.notes[0].startswith("one rank of 8 is read")
    assert not ran(["torchrun", "-m", "train"], False, capsys)[1].notes


def test_a_check_takes_a_module(project):
    (project / "memory.toml").write_text("module = 'train'\narguments = ['--x']\n")
    assert run(check.CheckFile.load("memory.toml").program()).done
    (project / "memory.toml").write_text("module = 'train'\nscript = 'train.py'\n")
    with pytest.raises(ValueError, match="one of them"):
        check.CheckFile.load("memory.toml")


def test_a_library_below_the_script_stays_one(project):
    """With a whole environment in the project; and the lines of the library are below the script's one."""
    (project / "train.py").write_text(textwrap.dedent("""
        import sys
        sys.path.insert(0, "env/lib/python3.11/site-packages")
        from tool import cli
        cli.main()
        """))
    made = run(program(["train.py"]))
    found = Explanation(made)
    rows = str(found).partition("by line\n")[2].partition("\n\n")[0].splitlines()
    assert rows[0].endswith("  train.py:5: cli.main()") and "      env/lib/python3.11/site-packages/tool/" in rows[1]
    assert any("tool/data.py:3: return torch.randn(1024, 8)" in row for row in rows[1:])
    below = found.as_dict()["below"]
    assert below["line"] == "train.py:5" and any("tool/data.py:3" in line for line, _ in below["lines"])


@pytest.mark.parametrize("lines", [1, 20_000])
def test_who_reads_the_head_alone_gets_no_traceback(project, lines):
    """A pipe that is closed, while the script prints and while the account is printed."""
    (project / "train.py").write_text(f"for _ in range({lines}):\n    print('x' * 70)\n" + TRAIN.format(beside="data"))
    done = subprocess.run(f"{sys.executable} -m refimpl explain train.py | head -1", shell=True, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.stdout == "x" * 70 + "\n" and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_file_is_a_script_unless_a_module_is_asked_for(project):
    assert type(program(["train.py", "--x"])) is Script and type(program(["train"], is_module=True)) is not Script
