"""Trains a small GPT on real text over the axes of a mesh: from tokens to a checkpoint that any other mesh resumes.

    python examples/train_3d.py                                      one process
    python examples/train_3d.py --tp 2 --pp 2                        four, on this machine
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank … --master-addr … examples/train_3d.py --tp 8 --pp 2

The checkpoint is one folder, on a file system that all machines share. Run it again, on any mesh, to go on.
"""

import argparse
import functools
import itertools
from pathlib import Path

import torch

from refimpl import saving
from refimpl.data import TextData
from refimpl.engine import launch, together
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=128, layers=4, hidden=64, heads=4)
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def train(mesh, options):
    with torch.device("meta"):  # a rank makes its own part, once it is known
        model = GPT(CONFIG)
    engine = together(model, mesh, ADAMW, micro_batches=options.micro_batches, recompute=True)
    saving.check_shared(mesh.comm, options.directory)  # now, not when the last step is done
    if saving.exists(mesh.comm, options.directory):
        engine.load(options.directory)
    batches = TextData().batches(options.rows // mesh.dp, CONFIG.context_length, rank=mesh.here["dp"],
                                 world_size=mesh.dp, device=mesh.comm.device, epochs=None)
    for tokens, targets in itertools.islice(batches, engine.steps, options.steps):
        loss = engine.train_step(tokens, targets)
        engine.clip_grad_norm_(1.0)
        engine.step()
        if mesh.comm.rank == 0:
            print(f"step {engine.steps}: loss {loss.item():.4f}", flush=True)
    engine.save_weights(options.directory / "model.safetensors")  # first: it needs rank 0's disk alone
    engine.save(options.directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("tp", "cp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="of a batch, over all of dp")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="in all, those before a checkpoint included")
    parser.add_argument("--directory", type=Path, default=Path("build/train_3d"))
    options = parser.parse_args()
    launch(train, Mesh(tp=options.tp, cp=options.cp, pp=options.pp, dp=options.dp), options)
