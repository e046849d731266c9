"""From a recipe to an engine: what each of its values is, given to `together`, which has the order."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..attention import flash_attention, longformer_mask, sparse
from ..comm import FakeCommunicator
from ..compression import GradientCompressor
from ..mixed_precision import AdaptiveLossScaler
from ..model import GPT, Attention
from ..offload import CPUAdam, DiskStore, HostStore
from ..zero.quantized import BlockCodec
from .dry import DryRank, dry_rank, worst_rank
from .recipe_rules import mesh_of
from .together import together

if TYPE_CHECKING:
    from ..comm.communicator import Communicator
    from .recipe import Recipe
    from .training import ParallelEngine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw": (torch.optim.AdamW, {"foreach": True}), "adamw-fused": (torch.optim.AdamW, {"fused": True}),
              "adam": (torch.optim.Adam, {"foreach": True}), "momentum": (torch.optim.SGD, {"momentum": 0.9}),
              "sgd": (torch.optim.SGD, {})}
TILES_ABOVE = 2048  # tokens of a rank


def build(recipe: "Recipe", model: torch.nn.Module, comm: "Communicator | None" = None, *,
          optimizer: Callable[..., torch.optim.Optimizer] | None = None, loss: Any = None, seed: int = 0,
          weights: Any = None) -> "ParallelEngine":
    """Put together what `recipe` says, for `model`, on the ranks of `comm`; returns a ParallelEngine. All ranks call
    it.

    - `model`, `loss`, `seed`, `weights`: as `together` takes them. The model is changed in place.
    - `comm`: each rank's Communicator. None: this process alone, on the device where the model is.
    - `optimizer`: a function of parameters, in place of the recipe's.

    ValueError for a recipe of another number of ranks, and for what the model does not have; all that `together`
    raises.
    """
    if comm is None:
        comm = FakeCommunicator(0, 1, _device_of(model))
    given = {} if optimizer is None else {"optimizer": optimizer}
    return put_together(recipe, model, mesh_of(recipe, comm.world_size).connect(comm), loss=loss, seed=seed,
                        weights=weights, **given)


def put_together(recipe, model, mesh, **given):
    """Call `together` with the arguments that a recipe says; `given` ones come before."""
    return together(model, mesh, **{"optimizer": optimizer_of(recipe), **arguments(recipe, mesh.comm),
                                    "attend": attention_of(recipe), **given})


def _device_of(model):
    found = next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0)).device
    return torch.empty(0).device if found.type == "meta" else found


def optimizer_of(recipe: "Recipe") -> Callable[..., torch.optim.Optimizer]:
    """Return a recipe's optimizer, a function of parameters."""
    kind, options = OPTIMIZERS[recipe.optimizer]
    return functools.partial(kind, lr=recipe.learning_rate, **options)


def arguments(recipe, comm):
    """Return the arguments of `together` that are numbers, names, and what is made anew on each rank."""
    found = {name: getattr(recipe, name) for name in (
        "zero", "micro_batches", "schedule", "chunks", "style", "recompute", "sequence", "context", "mlp",
        "activations", "bucket_bytes", "in_flight_bytes")}
    found |= {"head": recipe.loss, "store": store_of(recipe), "update": CPUAdam() if recipe.update == "host" else None,
              "reduce_dtype": DTYPES.get(recipe.reduce_dtype),
              "dtype": DTYPES[recipe.precision] if recipe.precision in ("bf16", "fp16") else None,
              "autocast": torch.bfloat16 if recipe.precision == "autocast" else None,
              "scaler": scaler_of(recipe, comm) if recipe.precision == "fp16" else None}
    if recipe.compression != "none":
        found["hook"] = GradientCompressor(recipe.compression, recipe.compression_ratio,
                                           loss_scale=found["scaler"] and found["scaler"].get_scale)
    if recipe.zero == 3:
        found["look_ahead"] = recipe.look_ahead
        found["quantized_weights"] = None if recipe.gathers == "whole" else BlockCodec(bits=int(recipe.gathers[3:]))
    return found


def store_of(recipe):
    """Return where shards rest, or None for the device."""
    return {"device": lambda: None, "host": HostStore, "disk": lambda: DiskStore(recipe.folder)}[recipe.store]()


def scaler_of(recipe, comm):
    """Return the scaler of an fp16 recipe's loss, the same on all ranks."""
    fixed = recipe.loss_scale
    return AdaptiveLossScaler(
        fixed or 2.0**recipe.loss_scale_power, growth_interval=recipe.loss_scale_window,
        hysteresis=recipe.loss_scale_hysteresis, min_scale=fixed or recipe.least_loss_scale,
        max_scale=fixed or 2.0**24, comm=comm)


def attention_of(recipe, **how):
    """Return a function that gives a model the recipe's attention, in place, or None for the model's own. `how`: the
    kernel of block-sparse attention."""
    if recipe.window is not None:
        mask = functools.partial(_window, recipe.window, recipe.global_tokens)
        return lambda model: sparse(model, mask, **how)
    return functools.partial(_in_tiles, recipe) if recipe.attention != "own" and recipe.cp == 1 else None


def _window(window, global_tokens, T):
    return longformer_mask(T, window, min(global_tokens, T), causal=True)


def _in_tiles(recipe, model):
    if recipe.attention == "auto" and not (isinstance(model, GPT) and model.config.context_length > TILES_ABOVE):
        return
    if not isinstance(model, GPT):
        raise ValueError(f"attention=\"tiles\" of a {type(model).__name__}: its own is "
                         f"{getattr(getattr(model, 'config', None), '_attn_implementation', 'not known')}; give "
                         "attn_implementation=\"sdpa\" where it is built, which keeps no scores, and attention=\"own\"")
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_attention(flash_attention)


def without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model on the meta device. The model keeps its values, and they are not copied."""
    held = {id(x): x for x in (*model.parameters(), *model.buffers())}
    memo = {key: torch.nn.Parameter(x.detach().to("meta"), x.requires_grad) if isinstance(x, torch.nn.Parameter)
            else x.to("meta") for key, x in held.items()}
    return copy.deepcopy(model, memo)


def dry_recipe(recipe: "Recipe", make: Callable[[], torch.nn.Module], rows: int, length: int | None = None, *,
               rank: int | None = None, gpu: Any = None, **options: Any) -> DryRank:
    """Ask a rank what it holds and sends in a later step of a recipe, without memory; None: the fullest one.

    - `make`: a function that returns the model; it is called with the meta device as default.
    - `rows`, `length`: of the batch of one place on dp; `length` by default the model's context.
    - `gpu`: whose kernels run, as in `memory.dry_run`. `options`: `max_norm` and `every` of `dry_rank`.

    ValueError for rows that the micro-batches do not divide, and what `build` refuses.
    """
    return dry_ranks(recipe, make, rows, length, rank=rank, gpu=gpu, **options)[0]


def dry_ranks(recipe, make, rows, length=None, *, rank=None, gpu=None, **options):
    """Return the DryRank that `dry_recipe` returns, and after it those that were asked to find it."""
    attend = attention_of(recipe, **({} if gpu is None else {"kernel": "triton"}))
    options |= {"together": functools.partial(put_together, recipe, attend=attend), "optimizer": None, "gpu": gpu,
                "micro_batches": recipe.micro_batches, "schedule": recipe.schedule}
    if rank is not None:
        return [dry_rank(make, recipe.mesh, rank, rows, length, **options)]
    worst, found = worst_rank(make, recipe.mesh, rows, length, chunks=recipe.chunks, style=recipe.style, **options)
    return [worst, *(each for each in found if each is not worst)]
