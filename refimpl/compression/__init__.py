"""Fewer bytes on the wire: gradients are compressed before ranks send them, and what is left out is sent later.

    compressor = GradientCompressor("topk", ratio=0.05)               # on each rank
    engine = DataParallel(model, comm, optimizer, hook=compressor)    # or Zero1, Zero2, Zero3 of refimpl.zero

Order of reading: `papers/compression` (the idea in one screen), then one algorithm a file: `topk`, `threshold` and
`random_k` send a few numbers (`sparse`), `int8` and `sign` few bits of each (`blocks`), `powersgd` two thin matrices.
`compressor` has what all share, the residual above all; `reduction` sends payloads, as the communication hook of an
engine; `closed_forms` counts the bytes.

No file here knows ZeRO: an engine calls `attach`, `all_reduce`, `reduce_scatter`, `step` and `drop`.
Collectives on two levels are in `refimpl.comm`: `two_level`, beside `ring` and `tree`.
"""

from .compressor import ALGORITHMS, GradientCompressor, Payload

__all__ = ["ALGORITHMS", "GradientCompressor", "Payload"]
