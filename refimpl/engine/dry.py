"""Any rank of any mesh, asked on a laptop: the same code on tensors without memory, beside ranks that do not exist.

    found = dry_rank(partial(GPT, GPTConfig.named("gpt3-175b"), dtype=torch.bfloat16), Mesh(tp=8, pp=4, dp=32),
                     rank=0, rows=8, micro_batches=8, recompute=True)
    found.peak          # Ledger: bytes of this rank by category, at the highest moment of a later step
    found.traffic       # {axis: Traffic}: bytes that it sends in a step, over which wire

In a step of 1F1B stage r of p has n = p − r micro-batches in flight when its first backward ends; from then on it does
the same again, one forward, one backward. So n + 2 of its m micro-batches are traced, and the traffic of the others is
added. In a deep pipeline bytes grow by the same with each one in flight, so two shallow ones are traced in place of it:

    peak(n, m) = peak(n, n + 2)        peak(n, ·) = peak(3, ·) + (n − 3) · (peak(3, ·) − peak(2, ·))    in each phase
    traffic(m) = traffic(n + 2) + (m − n − 2) · traffic of a micro-batch
"""

import dataclasses
import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm import FakeCommunicator, Traffic
from ..common.ledger import Ledger
from ..pipeline import schedule as schedule_of
from ..pipeline import validate
from ..pipeline.partition import cuts
from ..pipeline.schedules import one_forward_one_backward
from ..zero.internals.store import DeviceMemory
from .together import ADAMW, together

if TYPE_CHECKING:
    from ..mesh import Mesh

WHOLE = "all"  # of the mesh: norms, losses, checks
PHASES = ("forward", "backward", "step")
DEEP = 7  # micro-batches in flight: with more of them, two shallow pipelines have fewer together


@dataclass
class DryRank:
    """What one rank holds and sends in a step.

    - `phases`: {phase: Ledger at its highest moment}; `phase`: the highest one, `peak` its Ledger.
    - `traffic`: {axis: Traffic}, "dp" being dp × cp, "all" norms and losses.
    - `trace`: the Tracker, with its figures. `steps`: the recording from where the engine is built.
    - `coordinates`: where the rank stands. `busiest`: the rank that has most optimizer states of those with the same
      parameters.
    - `shallower`: in a deep pipeline, the DryRank with one micro-batch less in flight than `trace` has, and `deeper`:
      how many there are more. Else None and 0.
    """

    rank: int
    coordinates: dict
    phases: dict
    traffic: dict
    trace: object
    busiest: int
    shallower: "DryRank | None" = None
    deeper: int = 0

    @property
    def steps(self) -> Any:
        """Return the recording of the steps alone, without what building and its proofs took."""
        return self.trace.after(_index(self.trace, self.trace.result.built))

    @property
    def phase(self) -> str:
        """Return the phase with the highest moment: "forward", "backward" or "step"."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def peak(self) -> Ledger:
        """Return the Ledger at the highest moment."""
        return self.phases[self.phase]

    def __repr__(self):
        at = ", ".join(f"{axis} {self.coordinates[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        sent = ", ".join(f"{axis} {each.total:,}" for axis, each in self.traffic.items() if each.total)
        return f"DryRank(rank {self.rank} ({at}): peak {self.peak.total:,} bytes; sent in a step: {sent})"


def dry_rank(build: Callable[[], torch.nn.Module], mesh: "Mesh", rank: int, rows: int, length: int | None = None, *,
             optimizer: Callable[..., torch.optim.Optimizer] | None = ADAMW, max_norm: float = 1.0,
             micro_batches: int = 1, schedule: str = "1f1b", every: bool = False, gpu: Any = None,
             **options: Any) -> DryRank:
    """Ask a rank of a mesh what it holds and sends in a later step, one with optimizer states. Returns a DryRank.

    - `build`: a function that returns the model; it is called with the meta device as default.
    - `rows`, `length`: of the batch of one place on dp; `length` by default the model's context.
    - `every`: trace all micro-batches of 1F1B. `gpu`: whose kernels run, as in `memory.dry_run`.
    - `options`: those of `together`.

    ValueError for rows that the micro-batches do not divide, and what `together` refuses.
    """
    if rows % micro_batches:
        raise ValueError(f"rows={rows} in {micro_batches} micro-batches: expected a multiple, so that all are alike")
    options |= {} if optimizer is None else {"optimizer": optimizer}
    ask = functools.partial(_asked, build, mesh, rank, (rows // micro_batches, micro_batches, length), max_norm, gpu,
                            options)
    flight = min(micro_batches, mesh.pp - mesh.coordinates(rank)["pp"])
    # in other schedules micro-batches in flight follow no simple rule: trace all of them
    if schedule != "1f1b" or mesh.pp == 1 or every:
        return ask(schedule, micro_batches)
    steady = min(2, micro_batches - flight)
    if flight <= DEEP or not steady:  # without a later forward messages wait for longer than in a shallow one
        return ask(schedule, flight + steady)
    two, three = (ask(one_forward_one_backward(mesh.pp, n + steady, in_flight=n), n + steady) for n in (2, 3))
    grow = functools.partial(_grown, two.phases, three.phases, flight - 3)
    return dataclasses.replace(three, phases={phase: grow(phase) for phase in three.phases}, shallower=two,
                               deeper=flight - 3)


def _grown(less, more, times, phase):
    """Return a phase's Ledger of a pipeline that has `times` micro-batches more in flight than `more`, which has one
    more than `less`."""
    names = {*less[phase], *more[phase]}
    return Ledger({name: more[phase].get(name, 0) + times * (more[phase].get(name, 0) - less[phase].get(name, 0))
                   for name in names})


def _asked(build, mesh, rank, size, max_norm, gpu, options, schedule, traced):
    """Return the DryRank of a step of which so many micro-batches are traced."""
    from ..memory import dry_run

    b, m, length = size
    options = options | {"schedule": schedule, "micro_batches": traced}
    trace = dry_run(_step, build, mesh, rank, (b * m, b * traced, length), max_norm, options, gpu=gpu)
    before, between, after = trace.result.sent
    traffic = {axis: after[axis] - before[axis] for axis in after}
    for axis, in_step in ((axis, between[axis] - before[axis]) for axis in after if axis in ("tp", "cp", "pp")):
        repeated = Traffic(send=in_step["send"]) if axis == "pp" else in_step
        traffic[axis] += Traffic({name: count * (m - traced) // traced for name, count in repeated.items()})
    timeline, first = trace.timeline, _index(trace, trace.result.began) + 1  # row 0 is from before the first operation
    rows = {phase: [i for i in range(first, len(timeline)) if timeline.ops[i].phase == phase] for phase in PHASES}
    phases = {phase: timeline[max(at, key=timeline.totals.__getitem__)].ledger for phase, at in rows.items() if at}
    return DryRank(rank, mesh.coordinates(rank), phases, traffic, trace,
                   mesh.ranks("dp", "cp", rank=rank)[trace.result.busiest])


def _index(trace, time_ns):
    """Return the place of the first operation at a time, or later."""
    return bisect_left(trace.ops, time_ns, key=lambda op: op.time_ns)


class _Steps(NamedTuple):
    """When the engine was built, and the last step began (ns); what was sent before that, after its backwards, and at
    its end; the place with most states; how many parameters the whole model has."""

    built: int
    began: int
    sent: tuple
    busiest: int
    parameters: int


def _step(build, mesh, rank, size, max_norm, options):
    """Build a rank's part and make a step. Returns the _Steps."""
    mesh = mesh.connect(FakeCommunicator(rank, mesh.world_size))
    with torch.device("meta"):
        model = build()
    (length, hidden), parameters = _sizes(model), sum(p.numel() for p in model.parameters())
    engine = options.pop("together", together)(model, mesh, **options)
    del model
    built = time.time_ns()
    (all_rows, rows), length = size[:2], size[2] or length
    engine.expect(rows, length, hidden, next(engine.model.parameters()).dtype)
    batch = [torch.zeros(all_rows, length, dtype=torch.int64)[:rows] if needed else None for needed in engine.needs]
    first = first_steps(engine.engine)
    for _ in range(first):
        engine.train_step(*batch)
        engine.step()
    if not first:
        make_states(engine.engine)  # a first step would make them: what is asked is a later one
    for _ in range(3):
        order, began, before = gathers(engine.engine), time.time_ns(), sent(mesh)
        engine.train_step(*batch)
        between = sent(mesh)
        engine.clip_grad_norm_(max_norm)
        engine.step()
        if gathers(engine.engine) == order:
            break
    return _Steps(built, began, (before, between, sent(mesh)), busiest(engine.engine), parameters)


def _sizes(model):
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    return (getattr(config, "context_length", None) or config.max_position_embeddings,
            getattr(config, "hidden", None) or config.hidden_size)


def first_steps(engine):
    """Return how many steps a later one differs from in more than states. Two with a store, which has host memory for
    gradients and states together from the third on. One where stage 3 does not know yet in which order units run, the
    host makes states where it keeps them, or a compressor has left nothing out. Else none."""
    if not isinstance(engine._stored.store, DeviceMemory):
        return 2
    on_host = engine.stage and not hasattr(engine.update, "factor")
    return int(engine.stage == 3 or on_host or engine.reducer.hook is not None)


def gathers(engine):
    """Return in which order the last step of stage 3 has gathered its buckets, by which the next prefetches. It changes
    once more where a head is read by others than its unit; None for other stages."""
    return engine.parameters.gathering._order if engine.stage == 3 else None


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
