"""`refimpl rehearse` as a user calls it: peaks by hand, the line that asked for too much, what it refuses by name."""

import json
import os
import subprocess
import sys

import pytest

HEAD = ("import torch\nw = torch.nn.Parameter(torch.empty(256, 2**20, device='cuda'))\n"
        "o = torch.optim.SGD([w], lr=0.1)\n")
LOOP = "for step in range(9):\n    w.grad = torch.empty_like(w)\n    o.step()\n    o.zero_grad()\n"


def rehearsed(folder, text, *options, **environment):
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "refimpl", "rehearse", "--json", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)
    return done, json.loads(done.stdout) if done.stdout else None


def test_peaks_are_those_counted_by_hand_on_each_gpu(tmp_path):
    done, found = rehearsed(tmp_path, HEAD + LOOP, "--on", "h100,t4")
    assert done.returncode == 0 and list(found) == ["h100", "t4"]
    for each in found.values():
        assert each["made"] == 2 and each["ending"] == "steps" and each["out of memory"] is None
        assert [step["requested"] for step in each["steps"]] == [2 * 2**30] * 2 and each["steps"][1]["now"] == 2**31
        assert "on a device without kernels: bytes only, no numbers, no time" in each["words"]


def test_too_much_is_said_in_pytorch_s_words_with_the_line(tmp_path):
    done, found = rehearsed(tmp_path, HEAD + LOOP, "--budget", "1500MiB")
    failed = found["h100"]["out of memory"]
    assert done.returncode == 0 and failed["line"].endswith("train.py:5: w.grad = torch.empty_like(w)")
    assert failed["message"].startswith("CUDA out of memory. Tried to allocate 1024.00 MiB") and failed["step"] == 1


@pytest.mark.parametrize(("line", "words"), [
    ("x = w[w > 0]", "nonzero of a tensor on a device that computes nothing"),
    ("while w[0, 0].item() == 0: pass", "numbers were read since the last step, the last at train.py:4"),
    ("torch.save(w, 'new.pt')", "save: what a device that computes nothing holds is not the run's"),
    ("open('mine.txt', 'w')", "would write over")])
def test_what_depends_on_numbers_and_what_would_be_overwritten_is_refused(tmp_path, line, words):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "scratch").mkdir()
    done, found = rehearsed(tmp_path, HEAD + line + "\n" + LOOP, TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 1 and words in found["h100"]["said"]
    assert not (tmp_path / "new.pt").exists() and (tmp_path / "mine.txt").read_text() == "mine"


def test_with_numbers_a_script_may_decide_by_them(tmp_path):
    text = ("import torch\nw = torch.nn.Parameter(torch.ones(8, device='cuda'))\no = torch.optim.SGD([w], lr=0.1)\n"
            "while w.sum().item() > 5:\n    (w[w > 0] ** 2).sum().backward()\n    o.step()\n    o.zero_grad()\n")
    done, found = rehearsed(tmp_path, text, "--numbers", "--steps", "9")
    assert done.returncode == 0 and found["h100"]["ending"] == "end" and found["h100"]["by class"] == {"SGD": 3}
