"""The dry run of a step, and what can be said of it."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from .. import catalog, memory
from ..allocator import AllocationTrace, replay
from ..comm import FakeCommunicator
from ..memory.fakes.places import of_the_program, raised
from ..memory.tracking.taking import NOT_COUNTED
from .models import find
from .options import Options
from .step import train

PHASES = ("forward", "backward", "step")
ENDLESS = 2**50  # bytes of a device on which everything fits: how much would be reserved
LIBRARIES = 2**30  # what a verdict leaves for the CUDA context and libraries


@dataclass
class Estimate:
    """What a rank holds in a step, in bytes.

    - `peak`: a Ledger by category, at the highest moment, which is in `phase`; `phases`: the Ledger at the highest one
      of each. `resting`: between steps.
    - `build`: total before the first step; an engine gets a whole model, and cuts it.
    - `reserved`: what PyTorch's caching allocator would reserve for the step, by a replay. `elsewhere`: what another
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
    def fits(self):
        """Tell whether the GPU that was asked for has the bytes that would be reserved; None if none was asked for."""
        return None if self.gpu is None else self.reserved <= self.gpu.reported_bytes

    def __repr__(self):
        from .report import as_text

        return as_text(self)


def estimate(model, **options):
    """Estimate what each rank holds when `model` is trained. Returns an Estimate; nothing is computed or downloaded.

    `model`: a name of the catalog, the path of a config.json, or "file.py:function". `options`: those of `Options`.
    Raises ValueError for an option or a model that cannot be, with the line if a model cannot be built or run dry, and
    FileNotFoundError for no file.
    """
    options = Options(**options)
    source = find(model, options)
    try:
        dry = memory.dry_run(lambda: train(FakeCommunicator(0, options.gpus), model, options))
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from error
    trace, parameters, elsewhere = dry.result
    phases = {phase: trace.peak_moment(phase).ledger for phase in PHASES}
    highest = trace.peak_moment()
    return Estimate(
        name=source.name, built_by=source.built_by, shape=source.shape, options=options, parameters=parameters,
        peak=highest.ledger, phase=highest.phase, phases=phases, resting=trace.now,
        build=dry.peak_moment("build").ledger.total, reserved=replay(AllocationTrace.of(trace), capacity=ENDLESS).peak,
        elsewhere=elsewhere, exact=_exact(options, elsewhere),
        bounded=_bounded(source, options, trace), assumed=[*source.assumed, *_placeholders(dry.notes)],
        gpu=None if options.gpu is None else catalog.hardware(options.gpu), trace=trace)


def _refusal(error):
    """Return the ValueError that says on which line a program's own error was; None if `error` says what is needed."""
    places = raised(error)
    ours = places and places[0].path.startswith(str(Path(__file__).parents[1]))
    if isinstance(error, ValueError) and (ours or re.match(r"\S+\.py:\d+: ", str(error))):
        return None
    place = of_the_program(places)
    return ValueError(f"{place}: `{place.expression}` raises {type(error).__name__} in a dry run: {error}")


def _exact(options, elsewhere):
    said = [f"every tensor of {f'rank 0 of {options.gpus}' if options.gpus > 1 else 'the one rank'}, in a step that is "
            "not the first: a tracker reads the same bytes of the real step on a CPU"]
    if options.gpus > 1:
        said.append(f"another rank holds {elsewhere:,} bytes more, counters of Adam" if elsewhere else
                    "no other rank holds more")
    return said


def _placeholders(notes):
    """Return which values the program asked for and got placeholders of. (Workspaces are of a CPU's kernels.)"""
    return [note for note in notes if not note.startswith(NOT_COUNTED)]


def _bounded(source, options, trace):
    said = ["reserved: PyTorch's allocator, replayed on this step alone; what ran before may have left other holes",
            "not counted: the CUDA context, workspaces inside kernels (cuBLAS: 8 MiB, on Hopper 32 MiB, a stream)"
            + (", buffers of NCCL" if options.gpus > 1 else "")]
    fewer = source.fewer_on_cuda() if source.fewer_on_cuda else None
    if fewer:
        said.append(f"on CUDA kernels keep {abs(fewer):,} bytes {'fewer' if fewer > 0 else 'more'} of activations than "
                    "the CPU's: norms in one kernel, statistics in fp32, masks of one byte")
    elif fewer is None:
        said.append("CUDA's kernels keep other things than the CPU's: masks of dropout of one byte, fp32 statistics of "
                    "LayerNorm, RMSNorm in one kernel; a term of tokens × hidden for each")
    if options.recompute:
        said.append("blocks that draw random numbers keep the generator's state, which a dry run does not: 5,056 bytes "
                    "each on a CPU, 16 on CUDA")
    if options.precision == "autocast":
        said.append("autocast has other lists on CUDA: softmax and norms run in fp32 there")
    if trace.peak["temporaries"] and options.optimizer in ("adamw", "adam"):
        said.append("the optimizer runs as on a GPU, foreach; PyTorch's default on a CPU takes fewer temporaries")
    return said
