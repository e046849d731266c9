"""`refimpl explain` from a shell: one run with everything on, and one that fails."""

import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from refimpl import cli
from refimpl.explain import script_run
from refimpl.explain.command import _verdict, as_one_word

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse, atexit, torch
from torch.utils.data import DataLoader, TensorDataset
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    assert parser.parse_args().out == "its own"
    atexit.register(print, "at exit")
    model = torch.nn.Sequential(torch.nn.Embedding(512, 32), torch.nn.Linear(32, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    for (tokens,) in DataLoader(TensorDataset(torch.randint(512, (64, 64))), batch_size=16, num_workers=2):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("not reached")
if __name__ == "__main__":
    main()
"""


def explain(*arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "refimpl", "explain", *map(str, arguments)], cwd=folder,
                          env=environment, capture_output=True, text=True, timeout=300)


def test_a_script_is_explained_and_written(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = explain("--out", "report", "train.py", "--out", "its own", folder=tmp_path)
    assert done.returncode == 0 and "not reached" not in done.stdout and done.stdout.endswith("at exit\n"), done.stderr
    said = done.stdout
    assert "train.py: 3 steps of AdamW, then ended" in said and "log-probabilities, kept by the loss" in said
    assert "train.py:" in said.partition("by line")[2], "the script's own lines"
    found = json.loads((tmp_path / "report" / "explain.json").read_text())
    assert found["schema"] == 1 and found["parameters"] == dict.fromkeys(("total", "trainable"), 65 * 512)
    assert found["peak"] == sum(found["ledger"].values())
    assert found["arithmetic"]["expected"] + sum(n for _, n in found["arithmetic"]["rest"]) == found["peak"]
    helps = {each["name"]: each for each in found["helps"]}
    assert helps["recompute"]["why"] and helps["logits"]["why"] and helps["rows"]["saves"] > 0.3 * found["peak"]
    page = (tmp_path / "report" / "explain.html").read_text()
    assert "<h2>What to change first</h2>" in page and escape(found["first"][0]["what"]) in page
    assert f"{found['peak']:,}" in page and "http" not in page and "data:image/png;base64," in page
    assert (tmp_path / "report" / "explain.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_fails_keeps_its_traceback_and_status(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("loss.backward()", "loss.backward(); 1 / 0"))
    done = explain("train.py", "--out", "its own", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "refimpl" not in done.stderr and done.stderr.count("File ") == 2
    assert "failed: ZeroDivisionError" in done.stdout and "parameters" in done.stdout


@pytest.mark.parametrize(("arguments", "words"), [
    (["no.py"], "no file no.py"), (["."], "is a folder"), (["--steps", "0", "x.py"], "expected a number of steps"),
    (["--try", "magic", "x.py"], "invalid choice: 'magic'"), ([], "SCRIPT")])
def test_what_makes_no_sense_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit) as done:
        cli.main(["explain", *arguments])
    assert done.value.code == 2 and words in capsys.readouterr().err


def test_until_a_step(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT.replace("assert ", "").replace("(64, 64)", "(640, 64)"))
    monkeypatch.chdir(tmp_path)
    cli.main(["explain", "--until", "step", "5", "--out", "report", "train.py", "--out", "x"])
    assert "train.py: 5 steps of AdamW, then ended" in capsys.readouterr().out
    monkeypatch.setattr(script_run, "MOST", 200)
    with pytest.raises(SystemExit) as done:
        cli.main(["explain", "--until", "step", "9", "train.py"])
    said = capsys.readouterr().err
    assert done.value.code == 2 and "9 steps: a recording has room for 200 operations, here " in said
    assert as_one_word(["explain", "train.py", "--until", "step", "9"])[1:] == ["train.py", "--until", "step", "9"]


def test_what_follows_the_script_is_its_own_with_two_dashes_too(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    cli.main(["explain", str(tmp_path / "train.py"), "--", "--steps", "9"])
    assert "['--', '--steps', '9']" in capsys.readouterr().out
    cli.main(["explain", "--", str(tmp_path / "train.py"), "x"])
    assert "['x']" in capsys.readouterr().out


def test_a_promise_is_off_by_a_share_of_what_was_saved():
    assert _verdict({"bound": False, "saves": 970}, 1000) == "3.0% off"
    assert _verdict({"bound": False, "saves": 500}, 1000) == "50.0% off: the promise was wrong"
