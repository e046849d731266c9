"""The dry run of a step, and what can be said of it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import catalog, memory
from ..comm import FakeCommunicator
from ..memory.tracking.taking import NOT_COUNTED
from .kernels import kernels_of
from .model_sources import find
from .refusal import refusal
from .report import as_text
from .reserved import cublas_workspace, reserved
from .tracked_step import train
from .training_options import CPU, Options

if TYPE_CHECKING:
    from ..engine.recipe import Recipe
    from .recipe_estimate import RecipeEstimate

PHASES = ("forward", "backward", "step")


@dataclass
class Estimate:
    """What a rank holds in a step, in bytes.

    - `peak`: a Ledger by category, at the highest moment, which is in `phase`; `phases`: the Ledger at the highest one
      of each. `resting`: between steps.
    - `build`: total before the first step; an engine gets a whole model, and cuts it.
    - `reserved`: what PyTorch's caching allocator would reserve, by a replay of two steps. `untrusted`: what another
      rank holds more, at most.
    - `exact`, `bounded`, `assumed`: sentences that say what these figures are worth.
    - `trace`: the recording, with figures. `gpu`: the catalog's Hardware that was asked for, or None.
    """

    name: str
    built_by: str
    shape: str
    options: Options
    parameters: int
    peak: memory.Ledger
    phase: str
    phases: dict
    resting: memory.Ledger
    build: int
    reserved: int
    elsewhere: int
    exact: list
    bounded: list
    assumed: list
    gpu: object = None
    trace: object = field(default=None, repr=False)

    @property
    def precision(self) -> str:
        """Return the precision that was asked for."""
        return self.options.precision

    @property
    def fits(self) -> bool | None:
        """Tell whether the GPU that was asked for has the bytes that would be reserved; None if none was asked for."""
        return None if self.gpu is None else self.reserved <= self.gpu.reported_bytes

    def __repr__(self):
        return as_text(self)


def estimate(model: object, recipe: "Recipe | None" = None, world: int | None = None,
             **options: Any) -> "Estimate | RecipeEstimate":
    """Estimate what each rank holds when `model` is trained. Returns an Estimate; nothing is computed or downloaded.

    `model`: a name of the catalog, the path of a config.json, or "file.py:function". `options`: those of `Options`.
    With a `recipe`, of `world` ranks, returns a RecipeEstimate: see `estimate_recipe`.
    Raises ValueError for an option or a model that cannot be, with the line if a model cannot be built or run dry, and
    FileNotFoundError for no file.
    """
    if recipe is not None:
        from .recipe_estimate import estimate_recipe  # the engine, with all techniques

        return estimate_recipe(model, recipe, world, **options)
    options = Options(**options)
    source, hardware = find(model, options), options.hardware
    kernels = None if hardware is None else kernels_of(hardware.name)
    try:
        dry = memory.dry_run(lambda: train(FakeCommunicator(0, options.gpus), model, options), gpu=kernels)
    except Exception as error:
        said = refusal(error)
        if said is None:
            raise
        raise said from error
    trace, whole, parameters, elsewhere = dry.result
    phases = {phase: trace.peak_moment(phase).ledger for phase in PHASES}
    highest = trace.peak_moment()
    return Estimate(
        name=source.name, built_by=source.built_by, shape=source.shape, options=options, parameters=parameters,
        peak=highest.ledger, phase=highest.phase, phases=phases, resting=trace.now,
        build=dry.peak_moment("build").ledger.total, reserved=reserved(whole, hardware),
        elsewhere=elsewhere, exact=_exact(options, elsewhere),
        bounded=_bounded(options), assumed=[*source.assumed, *_assumed(options, dry.notes)],
        gpu=None if options.gpu in (None, CPU) else catalog.hardware(options.gpu), trace=trace)


def _exact(options, elsewhere):
    read = "PyTorch's allocator reads the same bytes of the real step on CUDA, but for what is bounded below" if (
        options.hardware) else "a tracker reads the same bytes of the real step on a CPU"
    said = [f"every tensor of {f'rank 0 of {options.gpus}' if options.gpus > 1 else 'the one rank'}, in a step that is "
            f"not the first: {read}"]
    if options.gpus > 1:
        said.append(f"another rank holds {elsewhere:,} bytes more of the optimizer's state" if elsewhere else
                    "no other rank holds more")
    return said


def _assumed(options, notes):
    """Return whose kernels run, and which values the program asked for and got placeholders of."""
    hardware = options.hardware
    said = []
    if options.window is not None:
        said.append(f"attention: block_sparse_attention, a window of {options.window:,} tokens"
                    + (f" and {options.global_tokens:,} that all see" if options.global_tokens else ""))
    if hardware is not None:
        said.append(f"kernels of {hardware.name}, in PyTorch {torch.__version__.partition('+')[0]}")
    return said + [note for note in notes if not note.startswith(NOT_COUNTED)]


def _bounded(options):
    hardware, said = options.hardware, []
    if hardware is None:
        said.append("a CPU's kernels; PyTorch's allocator for CUDA would reserve more, for cuBLAS's workspaces")
    else:
        said.append("reserved: PyTorch's allocator, replayed from the model on, with cuBLAS's workspaces of "
                    f"{cublas_workspace(hardware):,} bytes, one for forward's thread and one for backward's")
        said.append("not counted: the CUDA context, what cuDNN takes inside its kernels"
                    + (", buffers of NCCL" if options.gpus > 1 else ""))
        if options.optimizer.startswith("adam") and options.optimizer != "adamw-fused":
            said.append("counters of Adam are on the host: 4 bytes for each parameter tensor too many")
    if options.recompute and hardware is None:
        said.append("blocks that draw random numbers keep the generator's state, which a dry run does not: 5,056 bytes "
                    "each")
    elif options.recompute:
        said.append("states of the random generator are on the host: 5,056 bytes too many for each block that "
                    "transformers recomputes")
    return said
