"""What the tests of compression run on ranks, and the models that they use."""

import torch
from zero_kit import BUCKET, ENGINES, SGD, gpt, parameters_of, train_gpt

from refimpl.compression import GradientCompressor
from refimpl.compression.closed_forms import gradient_traffic

FLAT = ("topk", "threshold", "random", "int8", "sign")


def engine_of(comm, stage, compressor=None, optimizer=SGD, **options):
    return ENGINES[stage](gpt(), comm, optimizer, bucket_bytes=BUCKET, hook=compressor, **options)


def trained(comm, stage, algorithm, ratio=0.1, steps=3, micro_batches=1, **how):
    """(parameters, traffic, the gradients' part of it in closed form, traffic without a hook)."""
    compressor = GradientCompressor(algorithm, ratio, **how)
    found = []
    for hook in (compressor, None):
        engine, before = engine_of(comm, stage, hook), comm.traffic
        train_gpt(engine, steps, micro_batches)
        found.append((parameters_of(engine), dict(comm.traffic - before)))
    reductions = steps * (micro_batches if stage >= 2 else 1)
    expected = gradient_traffic(compressor, compressor.layouts, comm.world_size, comm.rank, shards=stage > 0)
    dense = sum(layout.numel * 4 for layout in compressor.layouts) * reductions
    return *found[0], {name: n * reductions for name, n in expected.items()}, found[1][1], dense


def gradient_on(rank, step, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
