"""`pip install` of the checkout into an empty environment: commands work without Jupyter and the tests' packages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.nightly
LEFT_OUT = ("jupyterlab", "pytest", "nbval", "transformers", "timm", "peft", "mypy", "playwright")
RECORDING = "data/recordings/phantom-2.13.0/training.pickle.gz"


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment with torch, as pip's settings give it, and the package's wheel, built from a copy of the tree."""
    folder, where = tmp_path_factory.mktemp("installed"), ROOT / "constraints.txt"
    copy = shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(".git", ".venv*", "build", "learn"))
    run(folder, sys.executable, "-m", "venv", "venv")
    python = folder / "venv" / "bin" / "python"
    run(folder, python, "-m", "pip", "install", "-q", "--no-compile", "-c", where, "torch")
    run(folder, python, "-m", "pip", "install", "-q", "--no-compile", "-c", where, copy)
    return python


def run(folder, *command):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MPLBACKEND")}
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, env=kept)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_nothing_of_the_extras_is_there_and_the_commands_work(venv, tmp_path):
    asked = ("import importlib.util, json, sys; "
             "print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))")
    assert json.loads(run(tmp_path, venv, "-c", asked, *LEFT_OUT, "benchmarks", "exercises", "tests")) == []
    refimpl = venv.parent / "refimpl"
    script = ROOT / "examples" / "train_small.py"
    assert "what would help here" in run(tmp_path, refimpl, "explain", script, "--rows", "1")
    assert "gpt2: 124,439,808 parameters" in run(tmp_path, refimpl, "estimate", "gpt2")
    assert "reserved" in run(tmp_path, refimpl, "replay", ROOT / RECORDING)
