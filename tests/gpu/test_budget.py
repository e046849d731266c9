"""A budget of memory on a CUDA device: by PyTorch's allocator, whose peaks a test may read and reset itself."""

import re
import subprocess
import sys

import pytest
import torch
from outside.models import SMALL, hf, text

from benchmarks.meter import release_workspaces
from refimpl.guard.budget import Budget, OverBudget

pytestmark = [pytest.mark.bytes, pytest.mark.usefixtures("clean")]


def training(rows=(8, 16, 8), after=lambda: None):
    """A function that trains another's model, one step for each number of rows; `after()` is called behind each."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = hf("ForCausalLM", "llama", **SMALL)()
        batches = [text(batch=count)() for count in rows]
        optimizer = torch.optim.AdamW(model.parameters())

    def train():
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            after()
            optimizer.zero_grad()
    return train


def of_the_allocator(rows=(8, 16, 8)):
    """The peak of each step, by the allocator alone."""
    found = []

    def after():
        found.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    train = training(rows, after)
    torch.cuda.reset_peak_memory_stats()
    train()
    return found


def test_the_peak_is_the_allocator_s_of_the_highest_step():
    training()()  # from here on cuBLAS has its workspaces
    steps = of_the_allocator()
    with Budget(max(steps)) as budget:
        training()()
    assert budget.peak == max(steps) == steps[1] > steps[2]
    with pytest.raises(OverBudget) as found, Budget(max(steps) - 1):
        training()()
    said = str(found.value)
    assert said.startswith(f"optimizer step 2 (AdamW): {max(steps):,} bytes on cuda:0, 1 (1 B) more than ")
    seen = int(re.search(r"^total +([0-9,]+)", said, re.MULTILINE)[1].replace(",", ""))
    rest = max(steps) - seen - release_workspaces()
    assert 0 <= rest <= 0.02 * seen and "test_budget.py" in said and "model.layers" in said  # rounded to blocks


def test_building_counts_for_the_test_alone():
    def run():
        torch.empty(2**28, device="cuda")
        training()()
    with Budget("1 GiB"):
        run()
    with pytest.raises(OverBudget, match=r"^the whole test, highest in building: 1,[0-9,]+ bytes on cuda:0"):
        with Budget("1 GiB", per="test"):
            run()


def test_on_the_cpu_beside_cuda_the_bytes_are_the_cpu_s():
    there = torch.empty(2**20, device="cuda")
    with pytest.raises(OverBudget, match="bytes on cpu"), Budget("1 MiB"):
        torch.nn.Linear(512, 512)(torch.ones(512, 512))
    with Budget("3 MiB"):
        torch.nn.Linear(64, 64)(torch.ones(64, 64))
    assert there.is_cuda


TESTS = """
import pytest, torch

def train(steps=2):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4096, 1024, device="cuda")).sum().backward()
        optimizer.step()

def test_own_readings(memory_budget):
    torch.empty(2**28, device="cuda")
    with memory_budget("512 MiB"):
        train()
    assert torch.cuda.max_memory_allocated() >= 2**30

@pytest.mark.memory_budget("70 GiB")
def test_under():
    train()

@pytest.mark.memory_budget("40 MiB")
def test_over():
    train()
"""


def test_the_marker_and_what_a_test_reads_itself(tmp_path):
    (tmp_path / "test_users.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "refimpl.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "."]  # on the same device, by what this process has in its environment
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert re.search(r"OverBudget: optimizer step \d \(SGD\): [0-9,]+ bytes on cuda:0, ", done.stdout)
