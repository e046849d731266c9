"""All techniques together: from a model, a mesh and options to an engine. This file is the order.

    0  to(dtype)             16-bit weights, before anything is cut; then what a layer computes is exchanged: MLPs that
       mlps, loss, attention keep less, a loss without logits, attention in tiles or under a window
    1  cuts                  which layers are whose: counted on the whole model, so alike on all ranks
    2  context_parallel      attention sees the tokens of all ranks of cp
    3  tensor_parallel       each layer over the ranks of tp
    4  Division              this rank's stages of pp; what they share is named; the rest of the model goes
       give_values           only now bytes, if the model is on the meta device: a rank makes its own part
    5  sequence_parallel     tokens between the split layers, over the ranks of tp
    6  recompute             layers of this rank, or parts of them, are regions
       activations           what is kept is compressed, or goes to the host
    7  a pipeline            messages between stages; ties begin with one value; forwards under autocast, a scaled loss
    8  ZeRO                  optimizer states over the ranks of dp × cp, norms and checkpoints over all

Each step works on what the one before has left: TP has to see whole layers, recomputation split ones, and a pipeline
sends the values of ties before ZeRO moves them into buckets. A `Recipe` says all of it (`recipe`, `building`).

After "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (Narayanan et al. 2021).
"""

import contextlib
import copy
import functools
import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..activations import compress_activations, offload_activations
from ..checkpointing import DynamicCheckpoint, selective
from ..checkpointing import recompute as recompute_each
from ..comm.same_model import check_same_model
from ..common.nested_tensors import is_dry
from ..context import SequenceParallelAttention, context_parallel
from ..cross_entropy import without_logits
from ..equivalence.loss_check import prove_loss
from ..mlp import memory_efficient_mlps
from ..model import GPT
from ..pipeline import PipelineParallelStage
from ..pipeline import schedule as schedule_of
from ..pipeline.instructions import INPUT
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
             zero: int = 1, micro_batches: int = 1, schedule: Any = "1f1b", chunks: int | None = None,
             style: str = "parameters", recompute: Any = False, sequence: bool = False, context: Any = "ring",
             loss: Any = None, seed: int = 0, weights: Any = None, dtype: torch.dtype | None = None, mlp: str = "plain",
             head: str = "logits", attend: Any = None, activations: str = "kept",
             autocast: torch.dtype | None = None, scaler: Any = None,
             region: Callable[[], Any] = contextlib.nullcontext, **options: Any) -> ParallelEngine:
    """Split `model` over the ranks of a connected mesh; returns a ParallelEngine. All ranks call it.

    - `model`: our GPT, or a decoder of Hugging Face; an nn.Sequential if tp = cp = 1. The same on all ranks. On the
      meta device, a rank makes its own part alone, from `seed` or a safetensors file `weights`.
    - `mesh`: `Mesh(tp=2, pp=2, dp=2).connect(comm)`.
    - `zero`: the stage of ZeRO: 0 to 3, in a pipeline 0 or 1 (`refused`). `options`: further ones of its engine. States
      are cut over dp × cp, or over shards × cp if the mesh has `shards`.
    - `micro_batches`: of a step on each rank. `schedule`, `chunks`: a pipeline's order, see `pipeline.schedule`; or
      a Schedule.
    - `style`: how layers are shared out, see `pipeline.partition`.
    - `recompute`: keep of each layer its input alone; or what `Recipe.recompute` takes. `sequence`: split tokens
      between layers over tp, too.
    - `context`: how attention sees the tokens of cp: "ring", "ulysses" or "gathered".
    - `loss`: `loss(output, targets)`, for a model that has none of its own.
    - `dtype`: of the weights; None: as they are. `mlp`, `head` ("logits" or "chunked"), `activations`: as a Recipe's
      fields `mlp`, `loss` and `activations`. `attend`: a function that gives a model another attention, in place.
    - `autocast`: the dtype of operations in forwards. `scaler`: an AdaptiveLossScaler over all ranks. `region`: returns
      a context of yours that forwards run in.

    With dropout, seed ranks that differ in dp, cp or pp differently, those of tp alike.
    ValueError and TypeError for what cannot go together, before anything is split.
    """
    order = schedule_of(schedule, mesh.pp, micro_batches, chunks) if isinstance(schedule, str) else schedule
    exchange(model, dtype, mlp, head, attend)
    ends = cuts(model, order.stages, style)
    check(model, mesh, zero, order, ends, sequence, recompute, loss)  # while the model is still whole
    tp, cp, pp, data = (mesh.get_parallel_group(*axes) for axes in (("tp",), ("cp",), ("pp",), ("dp", "cp")))
    theirs = loss is None and loss_of(model) is not None
    if theirs:
        prove_loss(model, loss_of)  # a class may add to it, as what balances experts
    check_same_model(mesh.comm, model, seed=seed, weights=_bytes_of(weights))
    values = values_of(model, seed, weights)
    attention = SequenceParallelAttention(cp, context) if mesh.cp > 1 else None
    if attention is not None:
        context_parallel(model, attention)
    if mesh.tp > 1:
        tensor_parallel(model, tp, loss_parallel=not isinstance(model, GPT))
    loss = loss_of(model) if theirs else loss  # of logits that are split, now
    division = Division(model, ends, order, mesh)
    if head == "chunked" and not isinstance(model, GPT):
        loss = without_logits_of(model, division, order, mesh, theirs)
    del model  # the layers of other ranks go with it
    gc.collect()  # trials of layers, above, leave cycles that hold some of them
    if values is not None:
        give_values(division.here, mesh.comm.device, values)
    if sequence:
        for s, stage in division.stages.items():
            split_tokens(stage, tp, layers_of(stage), last_norm(stage), s == 0, s == order.stages - 1)
    recomputed = recomputed_part(division.layers, recompute)
    kept = keeping(division.here, activations)
    if mesh.sizes["replicas"] > 1:
        options |= {"shards": mesh.get_parallel_group("shards", "cp"), "replicas": mesh.get_parallel_group("replicas")}
    build = functools.partial(STAGES[zero], division.here, data, optimizer, world=mesh.comm, **options)
    engine = build() if mesh.pp == 1 else None  # it trains the one stage itself, and reduces during backward
    pipe = PipelineParallelStage(division.stages if engine is None else {0: engine}, pp, order, loss=loss,
                                 count=count, total=average_of(data), tied=division.tied,
                                 region=region_of_forwards(mesh.comm.device, autocast, kept, region),
                                 scale=None if scaler is None else scaler.get_scale)
    return ParallelEngine(mesh, pipe, engine or build(), attention, recomputed, scaler, sequence)


def exchange(model, dtype, mlp, head, attend):
    """Let a whole model have other weights, and compute parts of its layers otherwise, in place."""
    if dtype is not None:
        model.to(dtype)
    if mlp != "plain" and not memory_efficient_mlps(model, keep=mlp):
        raise ValueError(f"mlp={mlp!r} of a {type(model).__name__}: none of its layers is a feed-forward layer that is "
                         "known here; give mlp=\"plain\"")
    if head == "chunked" and isinstance(model, GPT):
        without_logits(model)
    if attend is not None:
        attend(model)


def without_logits_of(model, division, order, mesh, theirs):
    """Let the last stage of a decoder of others compute its own loss, without logits. Returns None, the loss of an
    engine whose last stage has one."""
    why = "it has no loss that is known" if not theirs else (
        "its head is split over ranks of tp, and so are its logits" if mesh.tp > 1 else
        f"schedule {order.name} divides backwards, and its head's would be left out" if any(
            each.kind == INPUT for orders in order.ranks for each in orders) else None)
    if why is not None:
        raise ValueError(f"loss=\"chunked\" of a {type(model).__name__}: {why}; give loss=\"logits\"")
    last = division.here if order.stages == 1 else division.stages.get(order.stages - 1)
    if last is not None:
        without_logits(last)
        last.shifted = True
        last.register_forward_pre_hook(_named_targets, with_kwargs=True, prepend=True)
    return None


def _named_targets(stage, args, kwargs):
    """Give a stage its targets by name: what cuts sequences over ranks of cp takes tokens alone by position."""
    return args[:1], {**kwargs, **({"targets": args[1]} if len(args) > 1 else {})}


def recomputed_part(layers, recompute):
    """Recompute layers, as `Recipe.recompute` says; return the policy, or None."""
    if recompute is False or recompute == "none":
        return None
    if recompute is True or recompute == "blocks":
        return recompute_each(layers)
    if isinstance(recompute, str):
        return selective(layers, recompute)
    return DynamicCheckpoint(layers, **{"ratio" if isinstance(recompute, float) else "interval": recompute})


def keeping(stage, activations):
    """Return a context for forwards in which a stage keeps its activations otherwise, or None."""
    if activations == "kept":
        return None
    return offload_activations(stage) if activations == "host" else compress_activations(stage, activations)


def region_of_forwards(device, autocast, kept, given):
    """Return a function that makes the context of a forward, the caller's outermost."""
    @contextlib.contextmanager
    def region():
        with given(), contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            with contextlib.nullcontext() if kept is None or not torch.is_grad_enabled() else kept:
                yield

    return given if autocast is None and kept is None else region


def loss_of(model):
    """Return how the last stage's output is scored: None for a GPT, which does so itself."""
    if isinstance(model, GPT) or not hasattr(type(model), "loss_function"):
        return None
    # the function alone: what refers to the model would hold the layers of other ranks
    score, vocabulary = model.loss_function, model.config.get_text_config().vocab_size
    return lambda logits, targets: score(logits=logits, labels=None, vocab_size=vocabulary, shift_labels=targets)


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
