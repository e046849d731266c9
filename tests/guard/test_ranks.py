"""Three ranks of torchrun under `refimpl run`: one folder, and who failed first, who was fullest, what differs."""

import json
import re
import subprocess
import sys

import pytest

from refimpl import cli

TRAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 64))
optimizer = (torch.optim.Adam if rank == 2 else torch.optim.SGD)(model.parameters(), lr=0.01)
taken = torch.ones(2**25) if rank == 2 else None
for step in range(1, 9):
    tokens = torch.zeros(4, 16 if rank == 2 else 8, dtype=torch.long)
    if rank == 1 and step == 4:
        tokens = tokens[:, :1].expand(4, 2**40)
    model(tokens).mean().backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
"""


@pytest.mark.faults
def test_one_rank_of_three_has_a_batch_too_long(tmp_path, capsys):
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "refimpl",
               "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and done.stderr.count("refimpl guard: ") == 1, done.stderr
    folder = tmp_path / "oom"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank0.steps.jsonl", "rank1.failure1.json", "rank1.failure1.txt", "rank1.steps.jsonl", "rank2.steps.jsonl"]
    assert json.loads((folder / "rank1.failure1.json").read_text())["batch"] == [4, 2**40]
    cli.main(["oom", str(folder)])
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:4]] == [[f"rank{rank}", "3"] for rank in range(3)]
    assert "\nfailed first: rank1, " in said and "\nfullest: rank2, " in said and "rank 1 of 3, step 4, forward" in said
    assert "in step 3, numbers in the batch: rank0 32, rank1 32, rank2 64\n" in said
    assert f"in step 3, optimizer state: rank0 0, rank1 0, rank2 {8 * (50 * 16 + 17 * 64) + 4 * 3:,}\n" in said
    assert re.search(r"1\. the longest batch so far: 4 rows of 1,099,511,627,776, and the longest before\s+had 8", said)
