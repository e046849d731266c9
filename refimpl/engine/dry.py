"""Any rank of any mesh, asked on a laptop: the same code on tensors without memory, beside ranks that do not exist.

    found = dry_rank(partial(GPT, GPTConfig.named("gpt3-175b"), dtype=torch.bfloat16), Mesh(tp=8, pp=4, dp=32),
                     rank=0, rows=8, micro_batches=8, recompute=True)
    found.peak          # Ledger: bytes of this rank by category, at the highest moment of a later step
    found.traffic       # {axis: Traffic}: bytes that it sends in a step, over which wire

In a step of 1F1B stage r of p has p − r micro-batches in flight when its first backward ends; from then on it does the
same again, one forward, one backward. So n = p − r + 2 are traced, and the traffic of the others is added.

    peak(m) = peak(n)        traffic(m) = traffic(n) + (m − n) · traffic of a micro-batch
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm import FakeCommunicator, Traffic
from ..common.ledger import Ledger
from ..pipeline import schedule as schedule_of
from ..pipeline import validate
from ..pipeline.partition import cuts
from .together import ADAMW, together

if TYPE_CHECKING:
    from ..mesh import Mesh

WHOLE = "all"  # of the mesh: norms, losses, checks


@dataclass
class DryRank:
    """What one rank holds and sends in a step.

    - `peak`: a Ledger; `traffic`: {axis: Traffic}, "dp" being dp × cp, "all" norms and losses.
    - `trace`: the Tracker, with its figures. `coordinates`: where the rank stands.
    - `busiest`: the rank that has most optimizer states of those with the same parameters.
    """

    rank: int
    coordinates: dict
    peak: Ledger
    traffic: dict
    trace: object
    busiest: int

    def __repr__(self):
        at = ", ".join(f"{axis} {self.coordinates[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        sent = ", ".join(f"{axis} {each.total:,}" for axis, each in self.traffic.items() if each.total)
        return f"DryRank(rank {self.rank} ({at}): peak {self.peak.total:,} bytes; sent in a step: {sent})"


def dry_rank(build: Callable[[], torch.nn.Module], mesh: "Mesh", rank: int, rows: int, length: int | None = None, *,
             optimizer: Callable[..., torch.optim.Optimizer] | None = ADAMW, max_norm: float = 1.0,
             micro_batches: int = 1, schedule: str = "1f1b", every: bool = False, **options: Any) -> DryRank:
    """Ask a rank of a mesh what it holds and sends in a later step, one with optimizer states. Returns a DryRank.

    - `build`: a function that returns the model; it is called with the meta device as default.
    - `rows`, `length`: of the batch of one place on dp; `length` by default the model's context.
    - `every`: trace all micro-batches of 1F1B. `options`: those of `together`.

    ValueError for rows that the micro-batches do not divide, and what `together` refuses.
    """
    if rows % micro_batches:
        raise ValueError(f"rows={rows} in {micro_batches} micro-batches: expected a multiple, so that all are alike")
    traced = min(micro_batches, mesh.pp - mesh.coordinates(rank)["pp"] + 2)
    # in other schedules micro-batches in flight follow no simple rule: trace all of them
    traced = traced if schedule == "1f1b" and mesh.pp > 1 and not every else micro_batches
    options |= {"schedule": schedule, "micro_batches": traced}
    options |= {} if optimizer is None else {"optimizer": optimizer}
    size = (rows, rows // micro_batches * traced, length)
    from ..memory import dry_run

    trace = dry_run(_step, build, mesh, rank, size, max_norm, options)
    before, between, after, place = trace.result
    traffic = {axis: after[axis] - before[axis] for axis in after}
    for axis, in_step in ((axis, between[axis] - before[axis]) for axis in after if axis in ("tp", "cp", "pp")):
        repeated = Traffic(send=in_step["send"]) if axis == "pp" else in_step
        traffic[axis] += Traffic({name: count * (micro_batches - traced) // traced
                                  for name, count in repeated.items()})
    peak = max((trace.peak_moment(phase).ledger for phase in ("forward", "backward", "step")),
               key=lambda ledger: ledger.total)  # without the start
    return DryRank(rank, mesh.coordinates(rank), peak, traffic, trace, mesh.ranks("dp", "cp", rank=rank)[place])


def _step(build, mesh, rank, size, max_norm, options):
    """Build a rank's part and make a step. Returns what was sent before it, after its backwards, and at its end."""
    mesh = mesh.connect(FakeCommunicator(rank, mesh.world_size))
    with torch.device("meta"):
        model = build()
    length, hidden = _sizes(model)
    engine = options.pop("together", together)(model, mesh, **options)
    del model
    (all_rows, rows), length = size[:2], size[2] or length
    engine.expect(rows, length, hidden, next(engine.model.parameters()).dtype)
    batch = [torch.zeros(all_rows, length, dtype=torch.int64)[:rows] if needed else None for needed in engine.needs]
    first = first_steps(engine.engine)
    for _ in range(first):
        engine.train_step(*batch)
        engine.step()
    if not first:
        make_states(engine.engine)  # a first step would make them: what is asked is a later one
    before = sent(mesh)
    engine.train_step(*batch)
    between = sent(mesh)
    engine.clip_grad_norm_(max_norm)
    engine.step()
    return before, between, sent(mesh), busiest(engine.engine)


def _sizes(model):
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    return (getattr(config, "context_length", None) or config.max_position_embeddings,
            getattr(config, "hidden", None) or config.hidden_size)


def first_steps(engine):
    """Return how many steps a later one differs from in more than states. Two with a store, which has host memory for
    gradients and states together from the third on. One where stage 3 does not know yet in which order units run, the
    host makes states where it keeps them, or a compressor has left nothing out. Else none."""
    if engine._stored.store is not None:
        return 2
    on_host = engine.stage and not hasattr(engine.update, "factor")
    return int(engine.stage == 3 or on_host or engine.reducer.hook is not None)


def make_states(engine):
    """Give an optimizer of fake pieces the states that its first step would make."""
    pieces = [own for pairs in engine.update.pieces.values() for _, own in pairs]
    for own in pieces:
        own.grad_dtype, own.grad = own.dtype, torch.zeros_like(own)
    engine.optimizer.step()
    for own in pieces:
        own.grad = None


def busiest(engine):
    """Return which place on dp × cp has most bytes of states: shards are equal, the last one is padded, and an Adam has
    a counter for each piece."""
    owns = [own for pairs in engine.update.pieces.values() for _, own in pairs]
    if not engine.stage or not owns or owns[0] not in engine.optimizer.state:
        return 0
    kept = [x for x in engine.optimizer.state[owns[0]].values() if isinstance(x, torch.Tensor)]
    each = sum(x.itemsize for x in kept if x.shape == owns[0].shape)
    counters = sum(x.nbytes for x in kept if x.shape != owns[0].shape)

    def states(place):
        pieces = [piece for bucket in engine.buckets for piece in bucket.pieces(place)]
        return sum(piece.end - piece.first for piece in pieces) * each + len(pieces) * counters

    return max(range(engine.levels.shards.world_size), key=states)


def sent(mesh):
    """Return {axis: Traffic} of a connected mesh so far; "all": what goes over no single axis. Where dp is 1, dp × cp
    is cp, and counts there."""
    found, seen = {}, {}
    for axis, axes in (("tp", ("tp",)), ("cp", ("cp",)), ("pp", ("pp",)), ("dp", ("dp", "cp"))):
        group = mesh.get_parallel_group(*axes)
        found[axis] = group.traffic if group.world_size > 1 and group not in seen else Traffic()
        seen[group] = axis
    return found | {WHOLE: mesh.comm.traffic - sum(found.values(), Traffic())}


# --- the worst rank --------------------------------------------------------------------------------------------------


def candidates(build, mesh, schedule, style="parameters"):
    """Return ranks of which one holds most, without asking: in each stage's place one, and of these none that another
    one exceeds in all that bytes grow with.

    Ranks that differ in dp or cp alone have shards and tokens of equal size, but for padding (`busiest`). Those of tp
    have equal parts, but for vocabularies that do not divide evenly: the last has as many rows as any. Along pp bytes
    grow with the parameters here, the layers, the micro-batches in flight, and the ends of the model.
    """
    with torch.device("meta"):
        model = build()
    ends = cuts(model, schedule.stages, style)
    firsts = [0, *ends[:-1]]
    flights = in_flights(schedule)
    grows = {}
    for pp in range(mesh.pp):
        mine = schedule.stages_of(pp)
        grows[pp] = (sum(ends[s] - firsts[s] for s in mine), flights[pp], 0 in mine, schedule.stages - 1 in mine)
    kept = [pp for pp in grows if not any(
        all(a >= b for a, b in zip(grows[other], grows[pp], strict=True)) and (grows[other] != grows[pp] or other < pp)
        for other in grows if other != pp)]
    return [mesh.rank_at(tp=mesh.tp - 1, pp=pp) for pp in kept]


def in_flights(schedule):
    """Return the most micro-batches in flight on each rank of a schedule."""
    return [each.peak for each in validate(schedule)]


def worst_rank(build: Callable[[], torch.nn.Module], mesh: "Mesh", rows: int, length: int | None = None, *,
               micro_batches: int = 1, schedule: str = "1f1b", chunks: int | None = None, style: str = "parameters",
               **options: Any) -> tuple[DryRank, list[DryRank]]:
    """Find the rank with the highest peak: (its DryRank, those of all ranks that were run dry).

    Not all of the mesh is run: `candidates` leaves out ranks that hold as much as another one, or less. Arguments and
    errors are those of `dry_rank`, but for `rank`.
    """
    order = schedule_of(schedule, mesh.pp, micro_batches, chunks)
    ask = functools.partial(dry_rank, build, mesh, rows=rows, length=length, micro_batches=micro_batches,
                            schedule=schedule, chunks=chunks, style=style, **options)
    found = [ask(rank) for rank in candidates(build, mesh, order, style)]
    worst = max(found, key=lambda each: each.peak.total)
    if worst.busiest != worst.rank:
        found.append(ask(worst.busiest))
    return max(found, key=lambda each: each.peak.total), found
