"""What does not go together, said before anything is split, with what it would send where that is the reason.

A pipeline runs m micro-batches before a step. P bytes of parameters on a rank, N ranks of dp × cp; in units of
(N−1)/N · P a rank sends in a step, with gradients of the parameters' dtype,

    stage 0, 1      2            gradients are summed on the rank and reduced once, parameters gathered once
    stage 2         m + 1        a gradient in shards has to be reduced in every micro-batch
    stage 3         3m           parameters are gathered for each forward and each backward, too; 2m for those of the
                                 last layer, if its backward follows its forward

What stages 2 and 3 save there, a pipeline's layers over p ranks have saved already. Narayanan et al. 2021, section 3;
"PyTorch FSDP" (Zhao et al. 2023) and the Llama 3 paper keep gradients whole between micro-batches for the same reason.
"""

from torch import nn

from ..mesh import ConnectedMesh
from ..pipeline.instructions import INPUT
from ..pipeline.stages import stage_of


def units_sent(stage, micro_batches):
    """Return what a stage of ZeRO sends in a step, in units of (N−1)/N · P bytes (the table above)."""
    return {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]


def bytes_sent(stage, micro_batches, ranks, nbytes):
    """Predict the bytes that a rank sends over dp × cp in a step, of `nbytes` of parameters on `ranks` ranks, without
    padding and checks."""
    return units_sent(stage, micro_batches) * (ranks - 1) * nbytes // ranks


def check(model, mesh, zero, order, ends, sequence, recompute, loss):
    """Raise TypeError or ValueError for arguments of `together` that cannot go together."""
    if not isinstance(mesh, ConnectedMesh):
        raise TypeError(f"mesh={mesh!r}: expected a connected one, mesh.connect(comm)")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: expected a stage of ZeRO, 0 to 3")
    if zero > 1 and mesh.pp > 1:
        _refuse_sharded_gradients(model, mesh, zero, order, ends)
    if recompute not in (False, "none") and any(each.kind == INPUT for orders in order.ranks for each in orders):
        raise ValueError(f"recompute={recompute!r} with schedule {order.name}, whose backwards are in two parts: what "
                         "a layer has recomputed for the first one would have to stay until the second. Use "
                         "recompute=False, or a schedule with whole backwards, as 1f1b or interleaved")
    if sequence and mesh.tp == 1:
        raise ValueError("sequence=True with tp=1: the tokens between layers are split over tp; give the mesh tp, or "
                         "split the whole sequence over cp")
    if type(model) is nn.Sequential and loss is None:
        raise TypeError("an nn.Sequential returns no loss: give loss=, a function (output, targets)")


def _refuse_sharded_gradients(model, mesh, zero, order, ends):
    m, N = order.micro_batches, mesh.dp * mesh.cp
    stages = [stage_of(model, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    P = max(sum(sum(p.nbytes for p in stages[s].parameters()) for s in order.stages_of(r)) for r in range(mesh.pp))
    P //= mesh.tp
    does = "reduce gradients in each" if zero == 2 else "gather its parameters twice and reduce gradients in each"
    raise ValueError(
        f"zero={zero} in a pipeline of {m} micro-batches: a rank of the largest stage, with {P:,} bytes of parameters, "
        f"would {does}, and send {bytes_sent(zero, m, N, P):,} bytes over dp × cp in a step; zero=1 sends "
        f"{bytes_sent(1, m, N, P):,}. Use zero=1 (the pipeline has cut parameters and gradients already), or pp=1")
