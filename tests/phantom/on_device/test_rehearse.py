"""`refimpl rehearse` as a user calls it: peaks by hand, the line that asked for too much, what it refuses by name."""

import json
import os
import subprocess
import sys

import pytest

HEAD = ("import torch\nw = torch.nn.Parameter(torch.empty(256, 2**20, device='cuda'))\n"
        "o = torch.optim.SGD([w], lr=0.1)\n")
LOOP = "for step in range(9):\n    w.grad = torch.empty_like(w)\n    o.step()\n    o.zero_grad()\n"


def rehearsed(folder, text, *options, after=()):
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "refimpl", "rehearse", "--json", *options, "train.py", *after]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
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
    assert done.returncode == 1 and failed["line"].endswith("train.py:5: w.grad = torch.empty_like(w)")
    assert failed["message"].startswith("CUDA out of memory. Tried to allocate 1024.00 MiB") and failed["step"] == 1


REFUSED = {  # line → words of its error
    "w[w > 0]": "nonzero of a tensor on a device that computes nothing", "w.unique(dim=0)": "unique_dim of",
    "w.unique_consecutive()": "unique_consecutive of", "torch.repeat_interleave(w[0].long())": "repeat_interleave of",
    "open('old/mine.txt', 'w')": "was there before, and a rehearsal would write over it, move or remove it",
    "shutil.rmtree('old')": "was there before", "os.rename('old/mine.txt', 'x')": "was there before",
    "sqlite3.connect('old/mine.txt')": "was there before", "os.execv('/bin/true', ['true'])": "another program in its",
    "m.spawn(print, nprocs=4)": "with --world 4, or a multiple, torch.multiprocessing.spawn calls print in it",
    "m.get_context('spawn').Process(target=lambda: 0).start()": "for <lambda>, and a rehearsal reads this one alone"}


def test_what_depends_on_numbers_and_what_would_be_overwritten_is_refused(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("mine")
    text = HEAD + "import os, shutil, sqlite3, torch.multiprocessing as m\n" + "".join(
        f"try:\n    {line}\nexcept Exception as error:\n    print({i}, error)\n" for i, line in enumerate(REFUSED))
    done, found = rehearsed(tmp_path, text + "while w[0, 0].cpu().item() == 0: pass\n")
    said = dict(line.split(" ", 1) for line in done.stderr.splitlines() if line[:1].isdigit())
    assert all(words in said[str(i)] for i, words in enumerate(REFUSED.values())), said
    assert done.returncode == 1 and (tmp_path / "old" / "mine.txt").read_text() == "mine"
    assert "10,001 numbers were read since the last step, the last at train.py:49" in found["h100"]["said"]


def test_what_is_saved_at_last_read_reset_or_made_by_the_script_itself(tmp_path):
    """Tensors are not saved, at exit neither; its own readings are its own, and so is what it makes."""
    mine = """import atexit, os, shutil
assert torch.cuda.memory_snapshot()[0]["is_expandable"]
atexit.register(lambda: torch.save(w, 'old.pt'))
os.mkdir('new'); os.system('echo 1 > new/a'); open('new/a', 'w'); shutil.rmtree('new'); open('left', 'w')
print("loss", w.sum(), w[0, :2].tolist())
del o; v = torch.empty(2**30, device='cuda', dtype=torch.uint8); del v  # nothing of it is to be seen below
torch.cuda.reset_peak_memory_stats(); o = torch.optim.SGD([w], lr=0.1)
assert torch.cuda.max_memory_allocated() == 2**30 == w.nbytes
for number in range(6000): w[0, 0].item()
torch.save(w, 'new.pt')
"""
    tail = "    assert torch.cuda.max_memory_allocated() == 2**31\n    [w[0, 0].item() for _ in range(6000)]\n"
    (tmp_path / "old.pt").write_text("mine")
    text = "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'; " + HEAD + mine + LOOP + tail
    done, found = rehearsed(tmp_path, text, "--steps", "3", "--gpus", "2", "--snapshot", "m")
    found = found["h100"]
    assert done.returncode == 0, done.stderr
    assert found["steps"][0]["requested"] == found["steps"][2]["requested"] == 2**31 and found["not saved"] == {
        "save at train.py:13": 1}
    assert sorted(os.listdir(tmp_path)) == ["left", "m", "old.pt", "train.py"] and "loss tensor(0., " in done.stderr
    assert found["new"] == [str(tmp_path / "left")] and (tmp_path / "old.pt").read_text() == "mine"
    assert found["read"] == {"train.py:8": 2, "train.py:12": 6000, "train.py:19": 12000}, found["read"]


def test_a_module_is_run_as_python_runs_it(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "train.py").write_text(HEAD + "import sys\nfrom . import __name__ as package\n"
                                               "assert package == 'own' and sys.argv[1:] == ['--steps', '7']\n" + LOOP)
    command = [sys.executable, "-m", "refimpl", "rehearse", "--json", "-m", "own.train", "--steps", "7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["h100"]["steps"][1]["requested"] == 2 * 2**30


def test_options_may_follow_the_script_that_has_none_of_that_name(tmp_path):
    text = "import sys\nassert sys.argv[1:] == ['--batch', '8', '--steps', '5'], sys.argv\n'--steps'\n"
    done, found = rehearsed(tmp_path, text + HEAD + LOOP, after=["--on", "t4", "--batch", "8", "--steps", "5"])
    assert done.returncode == 0 and list(found) == ["t4"] and found["t4"]["made"] == 2


@pytest.mark.parametrize(("options", "words"), [
    (["--rank", "1"], "--rank 1: expected 0 ≤ rank < the number of --world, which is not given"),
    (["--snapshot", "none/x"], "--snapshot none/x: there is no such folder"), (["--on", "foo"], "unknown hardware")])
def test_refused_before_anything_runs(tmp_path, options, words):
    done, found = rehearsed(tmp_path, "raise SystemExit", *options)
    assert done.returncode == 2 and found is None and words in done.stderr


def test_with_numbers_a_script_may_decide_by_them(tmp_path):
    text = ("import torch\nw = torch.nn.Parameter(torch.ones(8, device='cuda'))\no = torch.optim.SGD([w], lr=0.1)\n"
            "while w.sum().item() > 5:\n    (w[w > 0] ** 2).sum().backward()\n    o.step()\n    o.zero_grad()\n")
    done, found = rehearsed(tmp_path, text, "--numbers", "--steps", "9")
    assert done.returncode == 0 and found["h100"]["ending"] == "end" and found["h100"]["by class"] == {"SGD": 3}
