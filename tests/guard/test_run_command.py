"""`refimpl run` leaves a script as `python` has it, says at once where it cannot write, and never hides an error."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext

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
x = torch.nn.Linear(4, 4)(torch.randn(2, 4))
x.register_hook(lambda gradient: torch.empty(2**60, dtype=torch.uint8))
try:
    x.sum().backward()
finally:
    print("finally")
"""


@pytest.fixture
def both(tmp_path):
    """(status, stdout, stderr) of `python`, and of `refimpl run`."""
    def ran(*words):
        for before in ([], ["-m", "refimpl", "run"]):
            done = subprocess.run([sys.executable, *before, *words], cwd=tmp_path, capture_output=True, text=True)
            yield done.returncode, done.stdout, done.stderr
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
    assert re.fullmatch(re.escape(plain[2]) + r"refimpl guard: .*; \S*rank0\.failure1\.txt\n", guarded[2])
    assert json.loads((tmp_path / "oom" / "rank0.failure1.json").read_text())["phase"] == "backward"


@pytest.mark.parametrize(("text", "status", "words"), [
    ("sys.exit(3)", 3, ""), ("sys.exit('no data')", 1, "no data\n"), ("sys.exit(None)", 0, ""), ("", 0, "")])
def test_its_status_is_the_script_s(tmp_path, capsys, text, status, words):
    (tmp_path / "train.py").write_text(f"import sys\n{text}")
    with pytest.raises(SystemExit) if status else nullcontext() as done:
        cli.main(["run", "--out", str(tmp_path / "oom"), str(tmp_path / "train.py")])
    assert (done.value.code if done else 0) == status and capsys.readouterr() == ("", words)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--out", "file/oom", "train.py"], "cannot write into"), (["--out", "file", "train.py"], "cannot write into"),
    (["none.py"], "no file"), (["-m", "no_such_module"], "no module"),
    (["--limit", "much", "train.py"], "invalid size value: 'much'")])
def test_what_cannot_be_is_said_before_the_script_runs(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('has run')")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as done:
        cli.main(["run", *arguments])
    found = capsys.readouterr()
    assert done.value.code == 2 and found.out == "" and words in found.err.splitlines()[-1]
    assert found.err.count("\n") == 1 or "--limit" in arguments, "argparse's own has the usage before it"
    assert not (tmp_path / "oom").exists()


def test_a_disk_that_is_full_hides_no_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text("""if True:
        import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            try:
                model(torch.zeros(1).expand(2**50, 4))
            except RuntimeError as error:
                print(error.__notes__)
        model(torch.zeros(1).expand(2**50, 4))""")

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


@pytest.mark.skipif(sys.platform != "linux", reason="a device that is always full is Linux's")
def test_a_log_that_cannot_be_written_is_said_once(tmp_path, capsys):
    with open("/dev/full", "wb", buffering=0) as full, memory.guard(tmp_path) as guard:
        before, guard._log._file = guard._log._file, full
        for _ in range(3):
            torch.optim.SGD([torch.zeros(3)]).step()
        guard._log._file = before
    assert guard.step == 3 and capsys.readouterr().err.count("the log cannot be written: [Errno 28]") == 1
