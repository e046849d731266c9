"""Estimates of a recipe: the fullest rank of a mesh, and the first, middle and last of a pipeline.

The rank's own code runs dry, beside ranks that do not exist (`engine.dry`). What a recipe puts together, it puts
together here, too: there is no formula in between.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .. import catalog
from ..comm import Traffic
from ..common.ledger import Ledger
from ..engine.building import dry_ranks
from ..engine.dry import DryRank
from ..engine.recipe import Recipe
from ..engine.recipe_budget import within
from ..engine.recipe_rules import mesh_of
from ..engine.recipe_why import Step, steps
from ..model import built_in
from ..pipeline.stages import layers_of
from .kernels import kernels_of
from .model_sources import find
from .recipe_report import as_text
from .refusal import refusal
from .reserved import cublas_workspace, reserved
from .training_options import CPU, Options


@dataclass
class RankEstimate:
    """What one rank holds and sends in a step, in bytes.

    - `which`: "fullest", "first", "middle", "last": of all ranks, and of the places on pp. `coordinates`: its places.
    - `phases`: {phase: Ledger at its highest moment}; `phase`: the highest one, `peak` its Ledger.
    - `reserved`: what PyTorch's caching allocator would reserve, by a replay.
    - `traffic`: {axis: Traffic}, "dp" being dp × cp, "all" norms and losses.
    """

    which: list
    rank: int
    coordinates: dict
    phases: dict
    phase: str
    reserved: int
    traffic: dict[str, Traffic]

    @property
    def peak(self) -> Ledger:
        """Return the Ledger at the highest moment."""
        return self.phases[self.phase]


@dataclass
class RecipeEstimate:
    """What the ranks of a recipe hold in a step. `ranks`: RankEstimates, the fullest first.

    - `batch`: sequences of one place on dp in a step; `shape` says so with their tokens. `parameters`: of the model.
    - `exact`, `bounded`, `assumed`: sentences that say what these figures are worth.
    - `gpu`: the catalog's Hardware that was asked for, or None.
    """

    name: str
    built_by: str
    shape: str
    recipe: Recipe
    batch: int
    parameters: int
    ranks: list
    exact: list
    bounded: list
    assumed: list
    gpu: Any = None

    @property
    def peak(self) -> Ledger:
        """Return the fullest rank's Ledger at the highest moment of a step."""
        return self.ranks[0].peak

    @property
    def reserved(self) -> int:
        """Return the most bytes that PyTorch's allocator would reserve on one of these ranks."""
        return max(each.reserved for each in self.ranks)

    @property
    def precision(self) -> str:
        """Return the recipe's precision."""
        return self.recipe.precision

    @property
    def fits(self) -> bool | None:
        """Tell whether the GPU that was asked for has the bytes that would be reserved; None if none was asked for."""
        return None if self.gpu is None else self.reserved <= self.gpu.reported_bytes

    def __repr__(self):
        return as_text(self)


def estimate_recipe(model: object, recipe: Recipe, world: int | None = None, **options: Any) -> RecipeEstimate:
    """Estimate what ranks hold when `model` is trained by a recipe. Nothing is computed or downloaded.

    - `model`: a name of the catalog, the path of a config.json, or "file.py:function": a decoder.
    - `world`: how many ranks there are; None: as many as the recipe has. A recipe whose dp is 1 gets those that are
      left.
    - `options`: `batch`, the sequences of one place on dp, `sequence`, the tokens of each, `attention`, `gpu` and
      `builder`, as in `Options`.

    ValueError for an option, a model or a recipe that cannot be, and what the model does not have; with the line if a
    model cannot be built or run dry. FileNotFoundError for no file.
    """
    recipe, options = on_ranks(recipe, world), Options(**options)
    asked = Asked(model, options)
    found = asked.ranks(recipe)
    places = {0: "first", recipe.pp // 2: "middle", recipe.pp - 1: "last"} if recipe.pp > 1 else {}
    which = {found[0].rank: ["fullest"]}
    for pp, name in reversed(places.items()):
        at = next((each for each in found if each.coordinates["pp"] == pp), None)
        if at is None:
            at = asked.rank(recipe, recipe.mesh.rank_at(tp=recipe.tp - 1, pp=pp))
            found.append(at)
        which.setdefault(at.rank, []).append(name)
    found[1:] = sorted(found[1:], key=lambda each: each.coordinates["pp"])
    hardware = options.hardware
    return RecipeEstimate(
        name=asked.source.name, built_by=asked.source.built_by, shape=asked.source.shape, recipe=recipe,
        batch=options.batch, parameters=found[0].trace.result.parameters,
        ranks=[_rank(each, which[each.rank], hardware) for each in found if each.rank in which],
        exact=_exact(options), bounded=_bounded(recipe, options, found), assumed=asked.assumed(recipe, found[0]),
        gpu=None if options.gpu in (None, CPU) else catalog.hardware(options.gpu))


def why(model: object, one: Recipe, two: Recipe, **options: Any) -> list[Step]:
    """Return what leads from one recipe to another, a field at a time: Steps with the bytes of each. Arguments and
    errors are `estimate_recipe`'s."""
    asked = Asked(model, Options(**options))
    return list(steps(one, two, lambda recipe: asked.ranks(recipe)[0]))


def fitted(model: object, recipe: Recipe, budget: int, **options: Any) -> Recipe:
    """Return the recipe with the fewest recomputed blocks whose fullest rank holds at most `budget` bytes. Arguments
    and errors are `estimate_recipe`'s; ValueError also for a budget that is too small."""
    asked = Asked(model, Options(**options))
    return within(recipe, budget, asked.layers(), lambda each: asked.ranks(each)[0])


def on_ranks(recipe, world):
    """Return the recipe of so many ranks."""
    rest = recipe.tp * recipe.pp * recipe.cp
    if world is not None and recipe.dp == 1 and world % rest == 0:
        recipe = recipe.replace(dp=world // rest)
    if world is not None:
        mesh_of(recipe, world)
    return recipe


class Asked:
    """A model and a batch, of which the ranks of recipes are asked."""

    def __init__(self, model, options):
        self.options, self.source = options, find(model, options)
        self.kernels = None if options.hardware is None else kernels_of(options.hardware.name)

    def _make(self):
        with built_in(self.options.dtype, None):
            return self.source.build()[0].train()

    def _ask(self, recipe, **place):
        if recipe.attention == "auto":  # what the source builds keeps no scores, and is what a GPU runs
            recipe = recipe.replace(attention="own")
        try:
            return dry_ranks(recipe, self._make, self.options.batch, self.options.sequence, gpu=self.kernels, **place)
        except Exception as error:
            said = ValueError(str(error)) if isinstance(error, TypeError) else refusal(error)
            if said is None:
                raise
            raise said from error

    def layers(self):
        """Return how many layers the model has."""
        with torch.device("meta"):
            return layers_of(self._make())

    def ranks(self, recipe):
        """Return the DryRanks of which one is the fullest, that one first."""
        return self._ask(recipe)

    def rank(self, recipe, rank):
        """Return one DryRank."""
        return self._ask(recipe, rank=rank)[0]

    def assumed(self, recipe, found):
        """Return what was not said, and whose kernels run."""
        hardware, said = self.options.hardware, list(self.source.assumed)
        if recipe.attention == "auto":
            said.append("attention: PyTorch's own, which keeps as many bytes as attention in tiles")
        if hardware is not None:
            said.append(f"kernels of {hardware.name}")
        return said + [note for note in found.trace.notes if "not counted" not in note]


def _rank(found: DryRank, which, hardware):
    """Return the RankEstimate of a DryRank. In a deep pipeline, what is reserved grows as bytes do."""
    holds = reserved(found.steps, hardware)
    if found.shallower is not None:
        holds += found.deeper * (holds - reserved(found.shallower.steps, hardware))
    return RankEstimate(which, found.rank, found.coordinates, found.phases, found.phase, holds, found.traffic)


def _exact(options):
    return ["every tensor of these ranks, in a step that is not the first: "
            + ("PyTorch's allocator reads the same bytes on CUDA, but for what is bounded below" if options.hardware
               else "a tracker reads the same bytes on CPUs")]


def _bounded(recipe, options, found):
    said = []
    if options.hardware is not None:
        said.append("reserved: PyTorch's allocator, replayed from the engine on, with cuBLAS's workspaces of "
                    f"{cublas_workspace(options.hardware):,} bytes, one for forward's thread and one for backward's"
                    + (", and grown by what each further micro-batch in flight takes" if any(
                        each.shallower for each in found) else ""))
        said.append("not counted: the CUDA context, what cuDNN takes inside its kernels"
                    + (", buffers of NCCL" if recipe.world_size > 1 else ""))
    if recipe.recompute != "none":
        said.append("what is recomputed keeps the states of random generators, on the host: a dry run has none")
    if recipe.store == "disk":
        said.append("not counted: the buffers of the file, in host memory")
    if recipe.pp > 1:
        said.append("a message that its receiver has not taken yet waits on the sender, in its first step all of them")
    return said
