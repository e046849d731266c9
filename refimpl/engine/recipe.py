"""One description of a training: which techniques are put together, with which sizes.

    recipe = Recipe(precision="bf16", recompute="blocks", zero=3, dp=8)
    engine = build(recipe, model, comm)            # on each of recipe.mesh.world_size ranks; on one without comm

Each field has its default, unit and meaning beside it (`describe` prints them). What cannot go together is refused when
the recipe is made, all of it in one error (`recipe_rules`); what depends on the model, when it is built, before
anything is split. A file in TOML says the same (`recipe_text`).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from ..mesh import Mesh
from . import recipe_text
from .recipe_budget import within
from .recipe_rules import check_recipe, known
from .recipe_why import explained

if TYPE_CHECKING:
    from os import PathLike

PRECISIONS = {
    "fp32": "weights, gradients and optimizer states in fp32",
    "autocast": "weights in fp32, operations under torch.autocast in bf16",
    "bf16": "weights and gradients in bf16, fp32 masters and optimizer states",
    "fp16": "weights and gradients in fp16, fp32 masters and optimizer states, a scaled loss",
}
RECOMPUTED = ("none", "blocks", "attention", "attention core", "mlp")
ACTIVATIONS = ("kept", "lossless", "bf16", "int8", "host")
DTYPES = ("fp32", "bf16", "fp16")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zero-bubble", "zb-v", "dualpipe-v")


def _of(default, means, *, values=None, unit=None, least=None):
    """A field with its meaning: one of `values`, or a number of `unit`, `least` or more."""
    return field(default=default, metadata={"means": means, "values": values, "unit": unit, "least": least})


@dataclass(frozen=True)
class Recipe:
    """Says what is put together. ValueError, with all that is wrong, for what cannot be or cannot go together."""

    precision: str = _of("fp32", "the dtypes of weights, gradients, states and operations", values=PRECISIONS)
    loss_scale: float = _of(0.0, "of fp16: the fixed factor of the loss; 0 finds one", unit="times", least=0)
    loss_scale_power: int = _of(16, "of fp16: the first factor is 2 to this power", unit="bits", least=0)
    loss_scale_window: int = _of(2000, "of fp16: the factor doubles after so many good steps", unit="steps", least=1)
    loss_scale_hysteresis: int = _of(1, "of fp16: the factor halves at so many overflows in a row", unit="overflows",
                                     least=1)
    least_loss_scale: float = _of(1.0, "of fp16: the factor is never below it", unit="times", least=0)

    micro_batches: int = _of(1, "parts of a rank's batch, one after the other", unit="micro-batches", least=1)
    recompute: "str | int | float" = _of("none", "what backward computes again: a part of each block; every k-th "
                                         "block, with an integer; a share of the blocks, with a fraction",
                                         values=RECOMPUTED, unit="k, or a share of the blocks", least=0)
    activations: str = _of("kept", "what is kept for backward: as it is, in fewer bits, or in host memory",
                           values=ACTIVATIONS)
    mlp: str = _of("plain", "what feed-forward layers keep: everything, their hidden layer once, their input alone",
                   values=("plain", "hidden", "input"))
    attention: str = _of("auto", "the model's own, or in tiles: auto takes tiles of our GPT above 2,048 tokens a rank",
                         values=("auto", "own", "tiles"))
    window: int | None = _of(None, "tokens that each one sees before it, by block-sparse attention; None: all",
                             unit="tokens", least=0)
    global_tokens: int = _of(0, "of a window: the first so many see all, and all see them", unit="tokens", least=0)
    loss: str = _of("logits", "the head's loss, from all logits at once, or from some rows' at a time",
                    values=("logits", "chunked"))

    optimizer: str = _of("adamw", "who updates", values=("adamw", "adamw-fused", "adam", "momentum", "sgd"))
    learning_rate: float = _of(1e-3, "of the optimizer", unit="a step", least=0)
    zero: int = _of(1, "what data parallel ranks cut: 0 nothing, 1 states, 2 gradients too, 3 parameters too",
                    values=(0, 1, 2, 3))
    store: str = _of("device", "where shards rest between their uses", values=("device", "host", "disk"))
    folder: str | None = _of(None, "of store=\"disk\": the folder of its file")
    update: str = _of("device", "where the optimizer runs, and its states are", values=("device", "host"))
    bucket_bytes: int | None = _of(None, "gradients that are reduced together; None: a sixteenth of all", unit="bytes",
                                   least=1)
    look_ahead: int = _of(1, "of zero=3: layers whose parameters are gathered before they are needed", unit="layers",
                          least=0)
    in_flight_bytes: int | None = _of(None, "gradients that are being reduced at a time; None: any number",
                                      unit="bytes", least=0)
    reduce_dtype: str | None = _of(None, "in which gradients are summed over ranks; None: their own", values=DTYPES)
    compression: str = _of("none", "how gradients are compressed before they are sent",
                           values=("none", "topk", "threshold", "random", "int8", "sign", "powersgd"))
    compression_ratio: float = _of(0.01, "of compression: the part of the numbers that is sent", unit="a share",
                                   least=0)
    gathers: str = _of("whole", "of zero=3: whether parameters are sent as they are, or quantised",
                       values=("whole", "int8", "int4"))

    dp: int = _of(1, "ranks with different rows of a batch", unit="ranks", least=1)
    shards: int | None = _of(None, "ranks of dp that cut states among them; None: all", unit="ranks", least=1)
    tp: int = _of(1, "ranks that share each layer", unit="ranks", least=1)
    sequence: bool = _of(False, "whether ranks of tp share the tokens between layers, too", values=(False, True))
    pp: int = _of(1, "ranks that share the layers, one after the other", unit="ranks", least=1)
    cp: int = _of(1, "ranks that share each sequence", unit="ranks", least=1)
    context: str = _of("ring", "how attention sees the tokens of all ranks of cp",
                       values=("ring", "ulysses", "gathered"))
    schedule: str = _of("1f1b", "the order of a pipeline's micro-batches", values=SCHEDULES)
    chunks: int | None = _of(None, "stages of each rank of pp; None: the schedule's own number", unit="stages",
                             least=1)
    style: str = _of("parameters", "what stages are to have equally much of",
                     values=("parameters", "uniform"))
    allocator: str = _of("", "settings of PyTorch's allocator, as in PYTORCH_CUDA_ALLOC_CONF")

    def __post_init__(self):
        check_recipe(self)

    @property
    def mesh(self) -> Mesh:
        """Return the Mesh of its ranks."""
        return Mesh(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, shards=self.shards)

    @property
    def world_size(self) -> int:
        """Return how many ranks it needs."""
        return self.dp * self.tp * self.pp * self.cp

    def replace(self, **changes: Any) -> "Recipe":
        """Return the same recipe with other values of some fields."""
        known(changes, self)
        return dataclasses.replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """Return {field: value} of those that are not the default."""
        return {each.name: getattr(self, each.name) for each in fields(self)
                if getattr(self, each.name) != each.default}

    def diff(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Return {field: (value here, value of `other`)} of those that differ."""
        return {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)
                if getattr(self, each.name) != getattr(other, each.name)}

    def explain(self, model: "torch.nn.Module | Callable[[], torch.nn.Module]", rows: int,
                length: int | None = None) -> str:
        """Return what each line does to a model, in words and bytes of the fullest rank, by dry runs.

        - `model`: a model, which stays as it is, or a function that returns it, which is called with the meta device
          as default.
        - `rows`, `length`: of the batch of one place on dp; `length` by default the model's context.

        ValueError and TypeError for what the model does not have, and for rows that the micro-batches do not divide.
        """
        return explained(self, asking(model, rows, length)[0])

    def within(self, budget: int, model: "torch.nn.Module | Callable[[], torch.nn.Module]", rows: int,
               length: int | None = None) -> "Recipe":
        """Return this recipe with the fewest recomputed blocks with which its fullest rank holds at most `budget` bytes
        in a step. Arguments and errors are `explain`'s; ValueError also for a budget that is too small."""
        ask, layers = asking(model, rows, length)
        return within(self, budget, layers, ask)

    def to_toml(self) -> str:
        """Return the recipe as TOML: the fields that are not the default, each with its meaning."""
        return recipe_text.to_toml(self)

    @classmethod
    def describe(cls) -> str:
        """Return all fields as text: name, default, meaning, values or unit."""
        return recipe_text.describe(cls)

    @classmethod
    def from_toml(cls, source: "str | PathLike[str]") -> "Recipe":
        """Return the recipe of a file, or of a text that has a line break or an equals sign.

        ValueError for what is no TOML, and for whatever the recipe's own error names; OSError for a file that cannot be
        read.
        """
        return recipe_text.from_toml(cls, source)

    def __repr__(self):
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def asking(model, rows, length):
    """Return a function that asks for the fullest rank of a recipe of `model`, and how many layers that has."""
    from ..pipeline.stages import layers_of
    from .building import dry_recipe, without_values

    make = functools.partial(without_values, model) if isinstance(model, torch.nn.Module) else model
    with torch.device("meta"):
        layers = layers_of(make())
    return lambda recipe: dry_recipe(recipe, make, rows, length), layers
