"""A memory.toml from elsewhere: each field with each bad value; and what --record writes reads as it is meant."""

import json
import os
import stat
import tomllib

import pytest
from bad_files import BAD, HOLE, TEXTS, as_text, command, refused, ten_of, with_hole

from refimpl import cli, memory
from refimpl.explain import check

TOML = {"script": "train.py", "arguments": ["--rows"], "steps": 2, "tolerance": 0.01,
        "recorded": {"peak": 7, "activations": 3, "torch": "2.13.0"}}
FIELDS = {("script",): (), ("function",): (), ("arguments",): ("missing",), ("arguments", 0): TEXTS,
          ("steps",): ("missing",), ("tolerance",): ("missing",), ("recorded",): (), ("recorded", "peak"): (),
          ("recorded", "activations"): ("missing",), ("recorded", "torch"): TEXTS}


def toml_of(found):
    lines = [f"{key} = {json.dumps(value)}" for key, value in found.items() if not isinstance(value, dict)]
    tables = [[f"[{key}]", toml_of(value)] for key, value in found.items() if isinstance(value, dict)]
    return "\n".join([*lines, *sum(tables, []), ""])


class Ran(SystemExit):
    """Raised in place of a run."""


@pytest.fixture
def runs_nothing(monkeypatch):
    def run(program, steps):
        raise Ran(0)
    monkeypatch.setattr(check, "run_script", run)


@pytest.mark.alone
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", FIELDS, ids=lambda place: ".".join(map(str, place)))
def test_a_bad_field_is_refused_in_one_line(tmp_path, runs_nothing, place, bad, record):
    (tmp_path / "train.py").write_text("")
    found, path = json.loads(json.dumps(TOML)), tmp_path / "memory.toml"
    if place == ("function",):
        found = {"function": "train.py:step"} | {key: found[key] for key in ("steps", "recorded")}
    with_hole(found, place, bad)
    hole = f'"{HOLE}"'
    path.write_text(toml_of(found) if bad == "missing" else toml_of(found).replace(hole, as_text(bad, nan="nan")))
    words = refused(lambda: command("check", path, *["--record"] * record), tmp_path)
    path.unlink()
    accepted = FIELDS[place] + (("missing",) if record and place == ("recorded",) else ())
    assert (words is None) == (bad in accepted), words


def test_ten_of_these(tmp_path, runs_nothing):
    for place, bad, record in ten_of(FIELDS, BAD, (False, True)):
        test_a_bad_field_is_refused_in_one_line(tmp_path, runs_nothing, place, bad, record)


STEPS = ['script = "train.py"  # see [recorded]\n', 'arguments = ["""\n[recorded]\n"""]\nscript = "train.py"\n',
         'script = "train.py"\n[recorded]  # of [3]\n# as of [1]\npeak = 4\n',
         'script = "train.py"\n\n[ recorded ]\npeak = 4',
         "script = 'train.py'\r\n[\"recorded\"]\r\npeak = 4\r\ntorch = '2'\r\n"]
INLINE = ['script = "train.py"\nrecorded = {peak = 4}\n', 'recorded.peak = 4\nscript = "train.py"\n']


def test_what_is_recorded_reads_back_as_meant(tmp_path):
    path, ledger = tmp_path / "memory.toml", memory.Ledger({"activations": 5, 'a "cat"\n': 2, "optimizer_state": 1})
    for text in STEPS:
        path.write_text(text, newline="")
        before = tomllib.loads(text)
        for _ in range(2):
            check.CheckFile.load(path).record(ledger, {})
            after = tomllib.loads(path.read_text())
            assert after.pop("recorded")["peak"] == 8
            assert after == {key: value for key, value in before.items() if key != "recorded"}
            assert check.CheckFile.load(path).recorded["optimizer_state"] == 1
        assert path.read_text().startswith(text.split("\n")[0].strip())
        assert [each.name for each in tmp_path.iterdir()] == ["memory.toml"]


@pytest.mark.parametrize("text", INLINE)
def test_a_file_that_cannot_be_edited_is_refused_before_the_run(tmp_path, runs_nothing, text):
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "memory.toml"
    path.write_text(text)
    assert "its recorded values cannot be replaced" in refused(lambda: command("check", path, "--record"), tmp_path)


def test_a_link_and_a_mode_stay(tmp_path):
    path, link = tmp_path / "memory.toml", tmp_path / "link.toml"
    path.write_text('script = "train.py"\n')
    path.chmod(0o640)
    link.symlink_to(path)
    check.CheckFile.load(link).record(memory.Ledger(activations=5), {})
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640 and "peak = 5" in path.read_text()


def test_nothing_is_recorded_of_a_step_without_bytes(tmp_path, capsys):
    path = tmp_path / "memory.toml"
    path.write_text('script = "train.py"\n')
    with pytest.raises(SystemExit) as ended:
        check._record(check.CheckFile.load(path), memory.Ledger(), {}, None)
    assert ended.value.code == 1 and "the peak has 0 bytes" in capsys.readouterr().err
    assert path.read_text() == 'script = "train.py"\n'


def test_a_pipe_and_a_file_that_is_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("#" * (check.LIMIT + 1))
    for name, words in (("pipe", "is a pipe or a device"), ("large", "expected at most 262,144")):
        assert words in refused(lambda name=name: command("check", tmp_path / name), tmp_path)


def test_names_of_a_script_move_no_cursor(tmp_path, monkeypatch, capsys):
    """Also on a terminal that has ASCII alone."""
    script = tmp_path / "t\x1b[2J\n\u202e.py"
    script.write_text("import torch\n"
                      "class Net(torch.nn.Module):\n"
                      "    def __init__(self):\n"
                      "        super().__init__()\n"
                      "        self.add_module('a\\x9b\\nforged', torch.nn.Linear(64, 64))\n"
                      "    def forward(self, x):\n"
                      "        return getattr(self, 'a\\x9b\\nforged')(x)\n"
                      "net = Net()\n"
                      "optimizer = torch.optim.SGD(net.parameters())\n"
                      "for _ in range(3):\n"
                      "    net(torch.zeros(8, 64)).sum().backward()\n"
                      "    optimizer.step()\n")
    monkeypatch.setattr("sys.argv", ["refimpl"])
    cli.main(["explain", str(script)])
    said = capsys.readouterr().out
    assert "t\\x1b[2J\\n\\u202e.py" in said and "a\\x9b\\nforged" in said
    assert not any(letter in said for letter in "\x1b\x9b\u202e") and "\nforged" not in said
