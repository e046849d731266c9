"""`refimpl run` leaves a script as `python` has it, says at once where it cannot write, and never hides an error."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from refimpl import cli, memory
from refimpl.guard import report

OTHER = """
import sys, pathlib
def f():
    raise ValueError("of the script's own")
print(sys.argv[1:], __name__, __file__, pathlib.Path(sys.argv[0]).name, __spec__ and __spec__.name, sys.path[0])
print("said", file=sys.stderr)
f()
"""
OF_MEMORY = """
import torch
class Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return torch.empty(2**60, dtype=torch.uint8)
model = torch.nn.Linear(4, 4)
try:
    Large.apply(model(torch.randn(2, 4))).sum().backward()
finally:
    print("finally")
"""


@pytest.fixture
def both(tmp_path):
    """(status, stdout, stderr) of `python` and of `refimpl run`."""
    def ran(*words):
        found = []
        for before in ([], ["-m", "refimpl", "run", "--out", str(tmp_path / "oom")]):
            done = subprocess.run([sys.executable, *before, *words], cwd=tmp_path, capture_output=True, text=True)
            found.append((done.returncode, done.stdout, done.stderr))
        return found
    return ran


@pytest.mark.parametrize("words", [["train.py"], ["-m", "package.train"]])
def test_a_script_is_as_python_has_it(tmp_path, both, words):
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "train.py", tmp_path / "package" / "train.py"):
        path.write_text(OTHER)
    plain, guarded = both(*words, "--limit", "3", "a b", "-m")
    tail = re.compile(r'.*?(?=  File "[^"]*train\.py)', re.DOTALL)  # Python's own runpy stands before a module
    assert plain[0] == 1 and plain[:2] == guarded[:2] and "['--limit', '3', 'a b', '-m'] __main__ /" in plain[1]
    assert tail.sub("", plain[2], 1) == tail.sub("", guarded[2], 1)
    assert guarded[2].startswith("said\nTraceback (most recent call last):\n  File") and "refimpl" not in guarded[2]


def test_an_error_of_memory_has_one_line_more(tmp_path, both):
    (tmp_path / "train.py").write_text(OF_MEMORY)
    plain, guarded = both("train.py")
    assert plain[0] == guarded[0] == 1 and guarded[1] == "finally\n"
    text, note = guarded[2].removesuffix("\n").rsplit("\n", 1)
    assert text + "\n" == plain[2] and re.fullmatch(r"refimpl guard: .*; \S*rank0\.failure1\.txt", note)
    assert json.loads((tmp_path / "oom" / "rank0.failure1.json").read_text())["phase"] == "backward"


@pytest.mark.parametrize(("text", "status", "words"), [
    ("sys.exit(3)", 3, ""), ("sys.exit('no data')", 1, "no data\n"), ("sys.exit(None)", 0, ""), ("", 0, "")])
def test_its_status_is_the_script_s(tmp_path, capsys, text, status, words):
    (tmp_path / "train.py").write_text(f"import sys\n{text}")
    try:
        cli.main(["run", "--out", str(tmp_path / "oom"), str(tmp_path / "train.py")])
        found = 0
    except SystemExit as error:
        found = error.code
    assert found == status and capsys.readouterr() == ("", words)


def refused(tmp_path, capsys, *arguments):
    (tmp_path / "train.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w').close()")
    with pytest.raises(SystemExit) as done:
        cli.main(["run", *arguments])
    found = capsys.readouterr()
    assert done.value.code == 2 and found.out == "" and not (tmp_path / "has run").exists()
    return found.err


def test_what_cannot_be_is_said_before_the_script_runs(tmp_path, capsys):
    script, file = str(tmp_path / "train.py"), tmp_path / "file"
    file.touch()
    for arguments, words in ((["--out", str(file / "oom"), script], "cannot write into"),
                             (["--out", str(file), script], "cannot write into"),
                             (["--out", str(tmp_path / "oom"), str(tmp_path / "none.py")], "no file"),
                             (["--out", str(tmp_path / "oom"), "-m", "no_such_module"], "no module")):
        said = refused(tmp_path, capsys, *arguments)
        assert words in said and said.count("\n") == 1 and said.startswith(("refimpl", "python -m refimpl", "pytest"))
    assert "invalid size value: 'much'" in refused(tmp_path, capsys, "--limit", "much", script)
    assert not (tmp_path / "oom").exists()


def test_a_disk_that_is_full_hides_no_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text(textwrap.dedent("""
        import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            try:
                model(torch.zeros(1).expand(2**50, 4))
            except RuntimeError as error:
                print(error.__notes__)
        model(torch.zeros(1).expand(2**50, 4))
        """))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    with pytest.raises(SystemExit) as done:
        cli.main(["run", "--out", str(tmp_path / "oom"), str(tmp_path / "train.py")])
    found = capsys.readouterr()
    assert done.value.code == 1 and "allocate" in found.err and found.err.count("No space left on device") == 3
    assert found.out.count("no report could be written") == 2, "and not that an earlier one is this one's"
    cli.main(["oom", str(tmp_path / "oom")])
    assert "in step 1; there is no report of it: OSError(28" in capsys.readouterr().out


def test_an_error_without_words_is_reported_too(tmp_path):
    with pytest.raises(MemoryError) as error, memory.guard(tmp_path):
        raise MemoryError
    assert "rank0.failure1.txt" in error.value.__notes__[0]
    assert json.loads((tmp_path / "rank0.failure1.json").read_text())["message"] == "MemoryError()"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_log_that_cannot_be_written_is_said_once(tmp_path, capsys):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with memory.guard(tmp_path) as guard:
        with open("/dev/full", "wb", buffering=0) as full:
            before, guard._log._file = guard._log._file, full
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            guard._log._file = before
    assert guard.step == 3 and capsys.readouterr().err.count("the log cannot be written: [Errno 28]") == 1
