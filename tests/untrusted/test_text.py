"""What is printed of names from elsewhere: no control character, on any stdout, and short."""

import contextlib
import io
import json
import os
import subprocess
import sys
import unicodedata

import pytest
from bad_files import CONTROL, RAW

from refimpl import cli
from refimpl.untrusted.text import one_line, print_json, print_raw, print_text, short, shown, visible


def test_every_control_character_is_written_out():
    every = "".join(map(chr, range(0x110000)))
    kept = {letter for letter in visible(every.replace("\\", "")) if unicodedata.category(letter) == "Cc"}
    assert kept == {"\n", "\t"}
    assert not any(unicodedata.category(letter) == "Cc" for letter in one_line(every))
    turning = {letter for letter in every if unicodedata.bidirectional(letter) in (
        "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")} | {"\u200e", "\u200f", "\u061c"}
    assert not turning & set(visible(every)) and len(turning) == 12
    assert visible("é → 数\ta\nb") == "é → 数\ta\nb" and one_line(CONTROL) == (
        "a\\x1b[2J\\x9b31m\\u202eb\\x7f\\nforged: 3 bytes\\tc")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_stdout_takes_it(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_text("é → \udc9b" + CONTROL, file)
    file.flush()
    said = file.buffer.getvalue().decode(encoding)
    assert said.endswith("\tc\n") and not RAW.search(said) and "\\udc9b" in said
    assert ("→" in said) == (encoding == "utf-8") and ("é" in said) == (encoding != "ascii")
    print_raw("\x1b[31m red é", file)
    file.flush()
    assert "\x1b[31m red" in file.buffer.getvalue().decode(encoding)


def test_json_is_ascii_and_reads_back():
    file, found = io.StringIO(), {"é\x7f\x9b\u202e": [CONTROL, 1.5]}
    with contextlib.redirect_stdout(file):
        print_json(found)
    assert json.loads(file.getvalue()) == found and file.getvalue().isascii() and not RAW.search(file.getvalue())


def test_a_value_is_shown_short():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    for value in (deep, "x" * 10**7, [CONTROL] * 10**6, dict.fromkeys(range(10**6)), 10**4000, b"x" * 10**7):
        assert len(shown(value)) < 2000 and not RAW.search(shown(value))


def test_the_middle_of_a_long_text_is_left_out():
    assert short("x" * 9 + "y", 10) == "x" * 9 + "y" and short("abcdefghijk", 10) == "abcde … ghijk"


def test_an_argument_moves_no_cursor(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", f"{CONTROL}.pickle"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not RAW.search(said.err) and said.err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main([CONTROL])
    assert not RAW.search(capsys.readouterr().err)


def test_ranks_and_commands_print_on_an_ascii_stdout(tmp_path):
    """Also what the ranks' own program writes, whose colours stay."""
    (tmp_path / "launch.py").write_text(
        "from refimpl.comm import launch\n"
        "if __name__ == '__main__':\n"
        "    launch(lambda comm: print('\\x1b[32mΣ → é'), 1)\n")
    asked = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    for command, words in (([str(tmp_path / "launch.py")], b"[rank 0] \x1b[32m\\u03a3 \\u2192 \\xe9"),
                           (["-m", "refimpl", "rehearse", "--help"], b"usage: "),
                           (["-m", "refimpl", "rehearse", "\u202e.py"], b"no file \\u202e.py")):
        done = subprocess.run([sys.executable, *command], env=asked, capture_output=True)
        assert words in done.stdout + done.stderr and b"Traceback" not in done.stderr, done
