"""What tests of quantised collectives run elsewhere: kernels where Triton interprets, engines on ranks."""

import contextlib

import torch
from zero_kit import BUCKET, gpt, train_gpt
from zero_steps import gpt_engine

from refimpl.comm.traffic import Traffic
from refimpl.zero.quantized import QuantizedReduce
from refimpl.zero.quantized.closed_forms import quantized_traffic


def through(codec, x):
    """(scales, codes, mean) of x (R, n)."""
    payloads = torch.zeros(len(x), codec.payload_bytes(x.shape[1]), dtype=torch.uint8)
    codec.encode(x, payloads)
    mean = torch.empty(1, x.shape[1])
    codec.decode(payloads[None], mean)
    return *(part.clone() for part in codec.parts(payloads, x.shape[1])), mean


def refused(codec, dtype):
    with contextlib.suppress(RuntimeError):
        try:
            through(codec, torch.ones(1, 20).to(dtype))
        except ValueError as error:
            return str(error)


def engine_of(comm, stage, weights=None, gradients=None, ranks_per_machine=None, **options):
    if stage == 3:
        options["quantized_weights"] = weights
    hook = None if gradients is None else QuantizedReduce(gradients, ranks_per_machine)
    return gpt_engine(stage, comm, hook=hook, **options)


def bytes_of_steps(comm, cases):
    """For each (stage, codecs and options, micro-batches): what the second step sends, and its closed form."""
    found = []
    for stage, codecs, micro_batches in cases:
        engine = engine_of(comm, stage, **codecs, steps=1, micro_batches=micro_batches)
        before = comm.traffic
        train_gpt(engine, 1, micro_batches)
        sent = comm.traffic - before
        said = quantized_traffic(gpt(device="meta"), comm.world_size, stage, rank=comm.rank,
                                 micro_batches=micro_batches, bucket_bytes=BUCKET, **codecs)
        found.append((dict(sent), dict(said), Traffic(sent).total))
    return found
