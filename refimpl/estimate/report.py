"""An estimate as text and as JSON."""

from dataclasses import asdict

from ..memory import human
from ..untrusted.text import one_line
from .training_options import OPTIMIZERS, PRECISIONS

VERSION = 1  # of docs/estimate.schema.json; it rises with a change that a reader could fail on
LIBRARIES = 2**30  # what a verdict leaves for the CUDA context and libraries


def as_text(found):
    """Return an Estimate as the command prints it."""
    options = found.options
    zero = "a plain loop" if options.is_plain else f"ZeRO {options.zero}" if options.zero else "data parallel"
    ranks = "one GPU" if options.gpus == 1 else f"each of {options.gpus} GPUs"
    lines = [f"{one_line(found.name)}: {found.parameters:,} parameters, built by {found.built_by}",
             f"{found.shape} on {ranks}, {zero}" + (", every block recomputed" if options.recompute else ""),
             f"{options.precision}: {PRECISIONS[options.precision]}",
             f"{options.optimizer}: {OPTIMIZERS[options.optimizer]}",
             "", f"the highest moment of a step is in {phase_of(found.phase)}:", repr(found.peak), "",
             "highest in " + ", ".join(f"{phase_of(phase)} {human(each.total)}"
                                       for phase, each in found.phases.items()),
             f"between steps {human(found.resting.total)}; before the first one {human(found.build)}"
             + ("" if options.is_plain else ", the model whole on every rank"),
             f"reserved by PyTorch's allocator: {human(found.reserved)}"]
    lines += [f"exact: {each}" for each in found.exact] + [f"bounded: {each}" for each in found.bounded]
    lines += [f"assumed: {one_line(each)}" for each in found.assumed]
    return "\n".join(lines + ([verdict(found)] if found.gpu else []))


def verdict(found):
    """Say whether the step fits on the GPU."""
    room = found.gpu.reported_bytes
    has = f"{found.gpu.name} has {human(room)}"
    if found.precision not in ("fp32", "fp16") and found.gpu.low_precision != "bf16":
        has += f" and no bf16, {found.gpu.low_precision} in its place"
    if not found.fits:
        return f"{has}: does not fit, {human(found.reserved - room)} too much"
    left = f"{human(room - found.reserved)} left for the CUDA context and libraries"
    if room - found.reserved < LIBRARIES:
        return f"{has}: may not fit, {left}, which take up to about {human(LIBRARIES)}"
    return f"{has}: fits, {left}"


def as_json(found):
    """Return an Estimate as a dict of numbers, texts, lists and dicts."""
    gpu = found.gpu and {"name": found.gpu.name, "bytes": found.gpu.reported_bytes, "fits": found.fits,
                         "verdict": verdict(found)}
    return {"version": VERSION, "model": found.name, "built_by": found.built_by, "parameters": found.parameters,
            "shape": found.shape, "options": asdict(found.options), "phase": found.phase,
            "peak": ledger_json(found.peak),
            "phases": {phase: ledger_json(each) for phase, each in found.phases.items()},
            "resting": ledger_json(found.resting),
            "build": found.build, "reserved": found.reserved,
            "elsewhere": found.elsewhere, "exact": found.exact, "bounded": found.bounded,
            "assumed": found.assumed, "gpu": gpu}


def ledger_json(ledger):
    """Return a Ledger as a dict with its total."""
    return {**ledger, "total": ledger.total}


def phase_of(phase):
    """Return a phase in words."""
    return "the optimizer's step" if phase == "step" else phase
