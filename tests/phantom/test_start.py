"""What `phantom.start` refuses, in one sentence and before anything is loaded."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from refimpl import catalog, phantom

ROOT = Path(__file__).parents[2]


def package(folder, version, cuda):
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('it was imported')")
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
        "hip: Optional[str] = None\n")
    return folder


def started(folder=None, program="phantom.start(memory=2**30)", **environment):
    """What the process says at last that starts a device; torch is the package in `folder`."""
    path = os.pathsep.join(map(str, filter(None, [folder, ROOT])))
    done = subprocess.run([sys.executable, "-c", f"from refimpl import phantom\n{program}"], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": path, **environment})
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("version", "cuda", "words"), [
    ("2.13.0+cpu", None, "torch 2.13.0+cpu is not a build for CUDA: the device needs what pip install torch gives on "),
    ("2.11.0+cu126", "12.6", "torch 2.11.0+cu126 was built for CUDA 12.6: the device knows CUDA 13"),
    ("3.0.0", "14.0", "torch 3.0.0 was built for CUDA 14.0: the device knows CUDA 13")])
def test_another_build_of_torch(tmp_path, version, cuda, words):
    assert words in started(package(tmp_path, version, cuda))


def test_torch_that_is_imported_already():
    assert "torch is imported already: call phantom.start before the first import" in started(
        program="import torch; phantom.start(memory=2**30)")


def test_a_gpu_that_is_there_unless_it_is_hidden(tmp_path):
    gpu = "import os; real = os.path.exists; os.path.exists = lambda path: path == '/dev/nvidia0' or real(path)\n"
    folder, start = package(tmp_path, "2.11.0+cu126", "12.6"), f"{gpu}phantom.start(memory=2**30)"
    said = started(folder, start)
    assert "there is a GPU in this machine: use it, or hide it with CUDA_VISIBLE_DEVICES= (empty)" in said
    assert "knows CUDA 13" in started(folder, start, CUDA_VISIBLE_DEVICES="")


def test_another_system(monkeypatch):
    with mock.patch.dict(sys.modules):
        del sys.modules["torch"]
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(phantom.CannotBuild, match="for Linux on x86-64 and Arm, this is darwin"):
            phantom.start(memory=2**30)


@pytest.mark.parametrize(("options", "words"), [
    ({"memory": 0}, "memory=0: expected a whole number, at least 1"),
    ({"memory": 1e9}, "memory=1000000000.0: expected a whole number"),
    ({"memory": 2**41}, "expected at most 1,099,511,627,776, 1 TiB"),
    ({"devices": 65}, "devices=65: expected at most 64"), ({"devices": 0}, "devices=0"),
    ({"context": 2**30}, "memory=1,073,741,824 bytes and context=1,073,741,824: nothing is left for PyTorch"),
    ({"capability": (9,)}, r"capability=\(9,\): expected two whole numbers, as \(9, 0\)")])
def test_numbers_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        phantom.start(**{"memory": 2**30, **options})


def test_it_is_never_on_by_itself():
    assert not phantom.running()
    with pytest.raises(RuntimeError, match="no device without kernels is on: call phantom.start"):
        phantom.libphantom()
    assert "REFIMPL_PHANTOM" not in os.environ
    assert phantom.words("2.14.1+cu130") == ("PyTorch 2.14.1's allocator on a device without kernels: bytes only, no "
                                             "numbers, no time")


def test_numbers_are_turned_on_once_after_torch_is_imported(tmp_path):
    """In a process that another one started, with packages that say when they are imported; nothing is left in the
    import system."""
    (tmp_path / "files").touch()
    (tmp_path / "torch.py").write_text("print('torch')")
    (tmp_path / "numbers.py").write_text("print('numbers')")
    program = f"""
import sys
from refimpl import phantom
before = sys.meta_path[:]
phantom.load()
phantom.__path__.insert(0, {str(tmp_path)!r})
import json, torch
assert sys.meta_path == before, sys.meta_path
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), phantom.VARIABLE: str(tmp_path),
        f"{phantom.VARIABLE}_NUMBERS": "1"})
    assert (done.stdout, done.stderr) == ("torch\nnumbers\n", "")


def test_unless_it_is_said_one_h100_is_started(monkeypatch):
    monkeypatch.setattr(phantom, "build", lambda *_: "folder")
    monkeypatch.setattr(phantom, "_torch", lambda: ())
    monkeypatch.setattr(phantom, "load", lambda: None)
    with mock.patch.dict(os.environ):
        phantom.start(memory=80 * 2**30)
        names = "DEVICES", "MAJOR", "MINOR", "PROCESSORS", "CONTEXT"
        said = [os.environ[f"{phantom.VARIABLE}_{name}"] for name in names]
    assert said == ["1", "9", "0", str(catalog.hardware("h100-sxm").processors), "0"]
