"""A guard around whole runs: its log, what it says, and what it refuses."""

import json
import os
import re
import resource
import sys

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from refimpl import memory
from refimpl.guard import Guard
from refimpl.guard.known_bytes import KnownBytes
from refimpl.guard.step_log import lines

MIB = 2**20


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 100))


def train(model, optimizer, steps, after=lambda loss: None, shape=(4, 32)):
    for _ in range(steps):
        tokens = torch.randint(0, 100, shape)
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss)


def test_the_log_has_a_line_a_step_with_exact_bytes(model, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    with memory.guard(tmp_path) as guard:
        train(model, optimizer, 5)
    steps = [each for each in lines(tmp_path / "rank0.steps.jsonl") if "step" in each]
    count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5] and guard.step == 5 and guard.last == steps[-1]
    for each in steps:
        assert each["batch"] == {"shape": [4, 32], "dtype": "int64", "calls": 1}
        assert each["peak"] == max(each["phases"].values()) == each["rest"] + sum(each["known"].values())
    known = steps[0]["known"]  # of this process, where other tests may have left models
    assert known["gradients"] >= 4 * count and known["optimizer state"] >= 8 * count + 4 * tensors
    assert {"forward", "backward", "optimizer"} <= set(steps[1]["phases"])
    assert lines(tmp_path / "rank0.steps.jsonl")[-1]["ended"] == "by itself"


def test_what_is_known_is_read_again_only_when_its_share_of_the_time_allows(model, tmp_path):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.guard(tmp_path) as guard:
        train(model, optimizer, 2)
        guard._known._spent = float("inf")
        train(model, optimizer, 2)
    read = [each["known at"] for each in lines(tmp_path / "rank0.steps.jsonl") if "known at" in each]
    assert read[0] == 1 and read[2] == read[3] == read[1] <= 2


def test_a_leak_is_said_with_its_line_and_holder_behind_step_11(model, tmp_path, capsys):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with memory.guard(tmp_path) as guard:
        train(model, optimizer, 40, lambda loss: losses.append(model(torch.zeros(64, 64, dtype=torch.long))))
    said = guard.said[0]
    assert "held by the graph of `losses[…]`" in said and "test_guard.py:" in said and "MiB a step since step" in said
    assert f"refimpl guard, rank 0: {said}" in capsys.readouterr().err and len(guard.said) == 1  # one a minute
    traced = next(each for each in lines(tmp_path / "rank0.steps.jsonl") if "traced" in each and "grows" in each)
    kept = 64 * 64 * (64 + 256 + 256 + 100) * 4 + 8 * 64 * 64  # the graph of four layers, and their tokens
    assert traced["grows"][0]["bytes"] == pytest.approx(kept, rel=0.01)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_ordinary_steps_run_without_a_dispatch_mode(model, tmp_path):
    optimizer, modes = torch.optim.SGD(model.parameters(), lr=0.1), []
    with memory.guard(tmp_path) as guard:
        train(model, optimizer, 30, lambda loss: modes.append(torch._C._len_torch_dispatch_stack()))
    assert not any(modes) and guard.said == []


def test_each_failure_that_a_script_catches_is_reported_and_the_run_goes_on(model, tmp_path):
    optimizer, failed = torch.optim.SGD(model.parameters(), lr=0.1), []
    train(model, optimizer, 2)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory.guard(tmp_path, limit=psutil.Process().memory_info().rss + 400 * MIB) as guard:
        for rows in (4, 4096, 2048, 4):
            try:
                train(model, optimizer, 1, shape=(rows, 512))
            except RuntimeError as error:
                failed.append((rows, error.__notes__, int(re.search(r"allocate (\d+) bytes", str(error))[1])))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert [rows for rows, *_ in failed] == [4096, 2048] and guard.step == 2
    for n, (_, notes, request) in enumerate(failed, 1):
        report = json.loads((tmp_path / f"rank0.failure{n}.json").read_text())
        assert len(notes) == 1 and notes[0].endswith(f"rank0.failure{n}.txt") and notes[0].startswith("refimpl guard: ")
        assert report["phase"] == "forward" and report["step"] == 2 and "cross_entropy(model(tokens)" in report["line"]
        assert report["request"] == request and report["missing"] == max(0, request - report["device"]["free"])
    assert len(guard.failures) == 2


def test_another_error_is_left_alone(model, tmp_path):
    with pytest.raises(ValueError, match="mine") as raised, memory.guard(tmp_path):
        raise ValueError("mine")
    assert not hasattr(raised.value, "__notes__") and not list(tmp_path.glob("*failure*"))
    assert lines(tmp_path / "rank0.steps.jsonl")[-1]["ended"] == "by ValueError"


def test_a_run_without_steps_or_without_an_optimizer_is_said(model, tmp_path, capsys, monkeypatch):
    with memory.guard(tmp_path) as guard:
        model(torch.zeros(2, 3, dtype=torch.long))
    assert "a model ran, and no step ended" in guard.said[-1] and "no step ended" in capsys.readouterr().err
    monkeypatch.setattr(KnownBytes, "find", lambda known: None)  # of optimizers that other tests have left
    with memory.guard(tmp_path) as guard:
        for _ in range(3):
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert guard.step == 3 and guard.said == [
        "no optimizer of torch.optim was in sight: each backward was counted as a step"]


@pytest.mark.parametrize(("arguments", "words"), [({"limit": 0}, "limit=0: expected bytes"),
                                                  ({"limit": "70GiB"}, "limit='70GiB': expected bytes"),
                                                  ({"stacks": "all"}, "stacks='all': expected \"oom\"")])
def test_a_setting_that_is_none_is_named(arguments, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        Guard(tmp_path / "oom", **arguments)
    assert not (tmp_path / "oom").exists()


def test_two_guards_are_refused_and_the_first_goes_on(model, tmp_path):
    with memory.guard(tmp_path / "a") as guard:
        with pytest.raises(RuntimeError, match="a guard is open already, in .*a: one watches the whole process"):
            memory.guard(tmp_path / "b").__enter__()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert guard.step == 1 and not (tmp_path / "b").exists()


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="a guard cannot write into .*file/oom"):
        memory.guard(tmp_path / "file" / "oom").__enter__()
    with memory.guard(tmp_path / "oom"):  # none is left open
        assert "refimpl.guard" in sys.modules and os.path.exists(tmp_path / "oom" / "rank0.steps.jsonl")
