"""The training script of examples/ as users run it: one process, ranks of one machine, torchrun over two machines."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_3d.py"
SIZES = ("--rows", "8", "--micro-batches", "2")


def began(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def losses(*programs):
    """{step: loss} that programs print, which run at once."""
    texts = [program.communicate(timeout=240)[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * len(programs), "\n".join(texts)
    return {int(step): float(loss) for text in texts for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def agents(folder, *options):
    """Two agents of torchrun on loopback, in place of two machines, with two processes each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [began("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--node-rank", node,
                  "--master-addr", "127.0.0.1", "--master-port", port, "--log-dir", folder / f"log{node}", SCRIPT,
                  *options) for node in range(2)]


def test_on_a_laptop_then_under_torchrun_on_two_machines_then_on_another_mesh(tmp_path):
    whole = losses(began(SCRIPT, "--steps", 6, "--directory", tmp_path / "whole", *SIZES))
    parts = losses(began(SCRIPT, "--steps", 2, "--directory", tmp_path / "parts", *SIZES))
    parts |= losses(*agents(tmp_path, "--tp", 2, "--pp", 2, "--steps", 4, "--directory", tmp_path / "parts", *SIZES))
    parts |= losses(began(SCRIPT, "--dp", 2, "--steps", 6, "--directory", tmp_path / "parts", *SIZES))
    assert list(parts) == list(whole) == [1, 2, 3, 4, 5, 6]
    assert list(parts.values()) == pytest.approx(list(whole.values()), abs=2e-4)
    assert (tmp_path / "parts" / "model.safetensors").exists()


def test_it_is_one_screen():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 120
