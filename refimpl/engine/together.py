"""Three dimensions together: from a model, a mesh and a few options to an engine. This file is the order.

    1  cuts                  which layers are whose: counted on the whole model, so alike on all ranks
    2  context_parallel      attention sees the tokens of all ranks of cp
    3  tensor_parallel       each layer over the ranks of tp
    4  Division              this rank's stages of pp; what they share is named; the rest of the model goes
       give_values           only now bytes, if the model is on the meta device: a rank makes its own part
    5  sequence_parallel     tokens between the split layers, over the ranks of tp
    6  recompute             each layer of this rank is a region
    7  a pipeline            messages between stages; ties begin with one value
    8  ZeRO                  optimizer states over the ranks of dp × cp, norms and checkpoints over all

Each step works on what the one before has left: TP has to see whole layers, recomputation split ones, and a pipeline
sends the values of ties before ZeRO moves them into buckets.

After "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (Narayanan et al. 2021).
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..checkpointing import recompute as recompute_each
from ..comm.same_model import check_same_model
from ..common.nested_tensors import is_dry
from ..context import SequenceParallelAttention, context_parallel
from ..equivalence.loss_check import prove_loss
from ..model import GPT
from ..pipeline import PipelineParallelStage
from ..pipeline import schedule as schedule_of
from ..pipeline.micro_batches import count_targets
from ..pipeline.partition import cuts
from ..tensor import tensor_parallel
from ..tensor.sequence_parallelism import split_tokens
from ..tensor.split_plan import region_of
from ..zero import DataParallel, Zero1, Zero2, Zero3
from .division import Division, layers_of
from .initial_values import FileValues, RandomValues, give_values, on_meta
from .refused import check
from .training import ParallelEngine

if TYPE_CHECKING:
    from ..mesh import ConnectedMesh

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
STAGES = (DataParallel, Zero1, Zero2, Zero3)


def together(model: torch.nn.Module, mesh: "ConnectedMesh", optimizer: Callable[..., torch.optim.Optimizer] = ADAMW, *,
             zero: int = 1, micro_batches: int = 1, schedule: str = "1f1b", chunks: int | None = None,
             style: str = "parameters", recompute: Any = False, sequence: bool = False, context: Any = "ring",
             loss: Any = None, seed: int = 0, weights: Any = None, **options: Any) -> ParallelEngine:
    """Split `model` over the ranks of a connected mesh; returns a ParallelEngine. All ranks call it.

    - `model`: our GPT, or a decoder of Hugging Face; an nn.Sequential if tp = cp = 1. The same on all ranks. On the
      meta device, a rank makes its own part alone, from `seed` or a safetensors file `weights`.
    - `mesh`: `Mesh(tp=2, pp=2, dp=2).connect(comm)`.
    - `zero`: the stage of ZeRO: 0 to 3, in a pipeline 0 or 1 (`refused`). `options`: further ones of its engine. States
      are cut over dp × cp, or over shards × cp if the mesh has `shards`.
    - `micro_batches`: of a step on each rank. `schedule`, `chunks`: a pipeline's order, see `pipeline.schedule`.
    - `style`: how layers are shared out, see `pipeline.partition`.
    - `recompute`: keep of each layer its input alone. `sequence`: split tokens between layers over tp, too.
    - `context`: how attention sees the tokens of cp: "ring", "ulysses" or "gathered".
    - `loss`: `loss(output, targets)`, for a model that has none of its own.

    With dropout, seed ranks that differ in dp, cp or pp differently, those of tp alike.
    ValueError and TypeError for what cannot go together, before anything is split.
    """
    order = schedule_of(schedule, mesh.pp, micro_batches, chunks)
    ends = cuts(model, order.stages, style)
    check(model, mesh, zero, order, ends, sequence, recompute, loss)  # while the model is still whole
    tp, cp, pp, data = (mesh.get_parallel_group(*axes) for axes in (("tp",), ("cp",), ("pp",), ("dp", "cp")))
    if loss is None and (loss := loss_of(model)) is not None:
        prove_loss(model, loss_of)  # a class may add to it, as what balances experts
    check_same_model(mesh.comm, model, seed=seed, weights=_bytes_of(weights))
    values = values_of(model, seed, weights)
    attention = SequenceParallelAttention(cp, context) if mesh.cp > 1 else None
    if attention is not None:
        context_parallel(model, attention)
    if mesh.tp > 1:
        tensor_parallel(model, tp, loss_parallel=not isinstance(model, GPT))
    division = Division(model, ends, order, mesh)
    del model  # the layers of other ranks go with it
    if values is not None:
        give_values(division.here, mesh.comm.device, values)
    if sequence:
        for stage in division.stages.values():
            split_tokens(stage, tp, layers_of(stage), last_norm(stage))
    recomputed = recompute_each(division.layers) if recompute else None
    if mesh.sizes["replicas"] > 1:
        options |= {"shards": mesh.get_parallel_group("shards", "cp"), "replicas": mesh.get_parallel_group("replicas")}
    build = functools.partial(STAGES[zero], division.here, data, optimizer, world=mesh.comm, **options)
    engine = build() if mesh.pp == 1 else None  # it trains the one stage itself, and reduces during backward
    pipe = PipelineParallelStage(division.stages if engine is None else {0: engine}, pp, order, loss=loss,
                                 count=count, total=average_of(data), tied=division.tied)
    return ParallelEngine(mesh, pipe, engine or build(), attention, recomputed)


def loss_of(model):
    """Return how the last stage's output is scored: None for a GPT, which does so itself."""
    if isinstance(model, GPT) or not hasattr(type(model), "loss_function"):
        return None
    score, vocabulary = functools.partial(getattr, model, "loss_function"), model.config.get_text_config().vocab_size
    return lambda logits, targets: score()(logits=logits, labels=None, vocab_size=vocabulary, shift_labels=targets)


def values_of(model, seed, weights):
    """Return what gives a model on the meta device its values, before it is split; None for one that has them."""
    if on_meta(model):
        made = RandomValues(copy.deepcopy(model), seed)
        return made if weights is None else FileValues(weights, made)
    if weights is not None:
        raise ValueError(f"weights={weights!r} of a model that has values: build it in `with torch.device(\"meta\"):`")
    return None


def _bytes_of(weights):
    """Return how large a file is that each rank reads, or None."""
    return os.path.getsize(weights) if weights is not None and os.path.isfile(weights) else None


def last_norm(stage):
    """Return after which module of a stage all tokens are needed again: its last norm, or its last layer."""
    return stage.get_submodule(region_of(stage)[1]) if stage.is_last else layers_of(stage)[-1]


def average_of(data):
    """Return a function of this rank's number of targets: that of all ranks of `data`, over their number. Losses that
    are divided by it, and averaged over these ranks, are the mean over the targets of all."""
    def average(count):
        total = data.all_reduce(torch.tensor(float(count), dtype=torch.float64, device=data.device))
        return count if is_dry(total) else total.item() / data.world_size

    return average if data.world_size > 1 else None


def count(targets):
    """Count the targets of a micro-batch that are not −100; in a dry run all, as they have no values."""
    return targets.numel() if is_dry(targets) else count_targets(targets)
