"""Every engine and mesh trains on several hosts as one process does."""

import json

import pytest
import torch
from hosts_kit import Hosts, missing
from together_kit import alone

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

STEPS, FAR = 3, 2e-6
TRAIN = """
import json, os
from together_kit import engine_of, run
from refimpl.comm import launch

axes, options = json.loads(os.environ["AXES"])

def fn(comm):
    return run(engine_of(comm, "gpt", axes, **options), {steps})

for found in launch(fn, int(os.environ["WORLD_SIZE"])):
    print("found", json.dumps(found))
""".replace("{steps}", str(STEPS))
CASES = [*(pytest.param({"dp": 4}, {"zero": stage}, 2, id=f"stage {stage}") for stage in (0, 1, 2, 3)),
         pytest.param({"dp": 4, "shards": 2}, {"zero": 3}, 2, id="hybrid"),
         pytest.param({"dp": 2, "tp": 2}, {"zero": 2}, 2, id="tensor in a host"),
         pytest.param({"tp": 4}, {}, (1, 2, 1), id="tensor over hosts"),
         pytest.param({"cp": 4}, {"context": "ring"}, 2, id="ring over hosts"),
         pytest.param({"pp": 4}, {"micro_batches": 4}, (1, 2, 1), id="a pipeline over three hosts"),
         pytest.param({"pp": 2, "tp": 2}, {"micro_batches": 2, "recompute": True}, 2, id="stages on hosts"),
         pytest.param({"dp": 2}, {"zero": 3}, 1, id="two")]


@pytest.mark.parametrize(("axes", "options", "ranks"), CASES)
def test_hosts_train_as_one_process(tmp_path, axes, options, ranks):
    names = ("hosta", "hostb", "hostc")[:2 if isinstance(ranks, int) else 3]
    with Hosts(tmp_path / "h", *names) as hosts:
        run = hosts.run(TRAIN, ranks, "forked", AXES=json.dumps([axes, options]))
        done = run.wait(60)
    found = [json.loads(line.partition(" ")[2]) for each in done.values() for _, line in each.lines
             if line.startswith("found ")]
    world = sum([ranks] * 2 if isinstance(ranks, int) else ranks)
    assert len(found) == world ** 2, run.text  # every rank has every result
    expected = alone("gpt", STEPS)
    for each in found:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(expected), rtol=FAR, atol=0)
