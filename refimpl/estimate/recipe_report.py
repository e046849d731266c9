"""An estimate of a recipe as text and as JSON, whose schema is docs/estimate.schema.json."""

from dataclasses import fields

from ..common.ledger import human
from ..untrusted.text import one_line
from .report import VERSION, ledger_json, phase_of, verdict

AXES = {"tp": "tp", "cp": "cp", "dp": "dp × cp", "pp": "pp", "all": "norms, losses"}


def as_text(found):
    """Return a RecipeEstimate as the command prints it."""
    recipe = found.recipe
    sizes = " × ".join(f"{axis} {getattr(recipe, axis)}" for axis in ("tp", "cp", "dp", "pp")
                       if getattr(recipe, axis) > 1)
    where = "one GPU" if recipe.world_size == 1 else f"each place on dp, {recipe.world_size} GPUs: {sizes}"
    lines = [f"{one_line(found.name)}: {found.parameters:,} parameters, built by {found.built_by}",
             f"{found.shape} on {where}", repr(recipe)]
    for each in found.ranks:
        lines += ["", f"{' and '.join(each.which)}: {_place(each)}; the highest moment of a step is in "
                      f"{phase_of(each.phase)}:", repr(each.peak),
                  "highest in " + ", ".join(f"{phase_of(phase)} {human(ledger.total)}"
                                            for phase, ledger in each.phases.items()),
                  f"reserved by PyTorch's allocator: {human(each.reserved)}"]
        sent = [f"{AXES[axis]} {human(traffic.total)}" for axis, traffic in each.traffic.items() if traffic.total]
        lines += [f"sent in a step: {', '.join(sent)}"] if sent else []
    lines += ["", *(f"exact: {each}" for each in found.exact), *(f"bounded: {each}" for each in found.bounded),
              *(f"assumed: {one_line(each)}" for each in found.assumed)]
    return "\n".join(lines + ([verdict(found)] if found.gpu else []))


def _place(each):
    return f"rank {each.rank} (" + ", ".join(f"{axis} {at}" for axis, at in each.coordinates.items()
                                             if axis in AXES) + ")"


def as_json(found):
    """Return a RecipeEstimate as a dict of numbers, texts, lists and dicts."""
    gpu = found.gpu and {"name": found.gpu.name, "bytes": found.gpu.reported_bytes, "fits": found.fits,
                         "verdict": verdict(found)}
    return {"version": VERSION, "model": found.name, "built_by": found.built_by, "parameters": found.parameters,
            "shape": found.shape, "batch": found.batch, "world": found.recipe.world_size,
            "recipe": {each.name: getattr(found.recipe, each.name) for each in fields(found.recipe)},
            "ranks": [{"which": each.which, "rank": each.rank,
                       "coordinates": {axis: at for axis, at in each.coordinates.items() if axis in AXES},
                       "phase": each.phase, "peak": ledger_json(each.peak),
                       "phases": {phase: ledger_json(ledger) for phase, ledger in each.phases.items()},
                       "reserved": each.reserved,
                       "traffic": {axis: {**traffic, "total": traffic.total} for axis, traffic in each.traffic.items()}}
                      for each in found.ranks],
            "reserved": found.reserved, "exact": found.exact, "bounded": found.bounded, "assumed": found.assumed,
            "gpu": gpu}
