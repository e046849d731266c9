"""A host that trains something else than the others, with tensors of the same shapes: it is named, before a step is."""

import pytest
from hosts_kit import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TRAIN = """
import functools, os
import torch
from torch import nn
from refimpl.comm import launch
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

here = os.uname().nodename == "hostb" and {differs!r}
Optimizer, lr, betas, decay, norm, seed, depth, bucket_bytes = torch.optim.AdamW, 0.1, (0.9, 0.99), 0.1, 1.0, 0, 4, 512
Activation, stage = nn.ReLU, {stage!r}
if here and ":" not in here:
    exec(here)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), Activation(), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))
if here == "forward: twice":
    Block.forward = lambda self, x: x + 2 * self.down(self.act(self.up(x)))

def fn(comm):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    make = functools.partial(Optimizer, lr=lr, weight_decay=decay, **({{"betas": betas}} if betas else {{}}))
    if stage is None:
        mesh = Mesh(**{axes!r}).connect(comm)
        engine = together(model, mesh, make, loss=nn.functional.mse_loss, bucket_bytes=bucket_bytes,
                          micro_batches=mesh.pp)
    else:
        engine = (DataParallel, Zero1, Zero2, Zero3)[stage](model, comm, make, bucket_bytes=bucket_bytes)
    for step in range(6):
        x = torch.ones(4, 8) * (1 + step)
        engine.train_step(x, x) if stage is None else engine.backward(engine(x).square().mean())
        engine.clip_grad_norm_(norm)
        if here == "schedule: faster" and step == 3:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.05
        engine.step()
        print("stepped", step, flush=True)
launch(fn, int(os.environ["WORLD_SIZE"]))
"""
SETTINGS = {"lr = 0.2": "another optimizer than rank 0", "decay = 0.2": "another optimizer than rank 0",
            "betas = (0.8, 0.99)": "another optimizer than rank 0",
            "Optimizer, betas = torch.optim.SGD, None": "another optimizer than rank 0",
            "norm = 2.0": "another max_norm than rank 0 (hosta): rank 0 (hosta): 1.0; rank 1 (hostb): 2.0",
            "schedule: faster": "another lr in param group 0 than rank 0 (hosta): rank 0 (hosta): 0.1; rank 1 (hostb): "
                                "0.05", "bucket_bytes = 256": "another engine than rank 0",
            "Activation = nn.GELU": "another model than rank 0", "forward: twice": "another model than rank 0"}


def said(tmp_path, differs, stage, axes):
    code = TRAIN.format(differs=differs, stage=stage, axes=axes)
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(code, how="forked")
        done = run.wait(30)
    assert {each.code for each in done.values()} == {1}, run.text
    return done


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("differs", SETTINGS)
def test_replicas_that_differ(tmp_path, differs, stage):
    for each in said(tmp_path, differs, stage, {}).values():
        assert f"CollectiveMismatch: {SETTINGS[differs]}" in each.text.replace("ranks [1] (hostb) have ", "").replace(
            "before step in step 0, ", "").replace("before step in step 3, ", ""), each.text
        assert "stepped 3" not in each.text and ("stepped" in each.text) == (differs == "schedule: faster")


@pytest.mark.parametrize(("differs", "words"), {
    "lr = 0.2": "another lr in param group 0", "norm = 2.0": "another max_norm", "seed = 1": "another parameters",
    "depth = 8": "another modules", "Activation = nn.GELU": "another modules", "forward: twice": "another code",
    "bucket_bytes = 256": None}.items())
@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp": 2}])
def test_what_is_cut_differs(tmp_path, differs, words, axes):
    if words is None and "pp" in axes:
        return  # each stage has buckets of its own
    if "dp" in axes:
        words = {"bucket_bytes = 256": "another engine", "lr = 0.2": "another optimizer"}.get(differs, words)
    for each in said(tmp_path, differs, None, axes).values():
        assert f"ranks [1] (hostb) have {words} than rank 0 (hosta)" in each.text, each.text
        assert "stepped" not in each.text
        if differs == "Activation = nn.GELU":
            assert "another line 4 of its text than rank 0 (hosta): rank 0 (hosta): (act): ReLU(); rank 1" in each.text
        if differs == "seed = 1":
            assert "ranks [1] (hostb) have another value of 0.up.weight" in each.text
