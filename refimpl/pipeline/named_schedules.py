"""The schedules by name, and what each costs in closed form: idle time, and activations in flight.

F, B, W: what forward, gradient of the input and gradients of the weights cost of all stages of a rank; p ranks, m
micro-batches, v stages (chunks) on a rank, rank r. A rank's idle time is its own, from the begin of its first
instruction to the end of its last. A rank's in-flight count is `validate.InFlight.peak`.

    schedule                    idle                         from m     in flight on rank r                source
    gpipe                       (p−1) (F+B+W)                1          m                                  [1]
    1f1b                        (p−1) (F+B+W)                1          min(m, p−r)                        [2]
    interleaved                 (p−1) (F+B+W) / v            p, 2p, …   2(p−r−1) + (v−1)p + 1 chunks       [2]
    zb-h1                       (p−1) (F+B−W)                p          min(m, p)                          [3]
    zb-h2                       max(0, (p−1) (F+B−2W))       2p−1       2p − 1                             [3]
    interleaved-zero-bubble     (p−1) (F+B−W) / v            p, 2p, …   vp chunks                          [3], PyTorch
    zb-v                        0 at F = B = W               2p         2p chunks: p whole ones            [4]
    dualpipe-v                  (p−1) F/2 at F = B = W       2p         2p + 1 chunks                      [4], [5]

The idle time is the largest over ranks, rank 0's; rank r of the first six has p − 1 − r in place of p − 1. W in the
three lines with a minus sign stands for min(F, W): a forward that is shorter than W hides no more than itself (the
papers assume W ≤ F). Counts without m hold from m = 2p. For fewer `simulate` and `validate` count.

[1] Huang et al. 2019, "GPipe", section 2.3. [2] Narayanan et al. 2021, "Efficient large-scale language model training",
sections 2.2.1 and 2.2.2. [3] Qi et al. 2023, "Zero bubble pipeline parallelism", table 2. [4] Qi et al. 2024, "Pipeline
parallelism with controllable memory". [5] DeepSeek-AI 2024, "DeepSeek-V3 technical report", table 2.
"""

from typing import TYPE_CHECKING, Any

from .schedules import check_sizes, gpipe, interleaved, one_forward_one_backward
from .v_shapes import dualpipe_v, zb_v
from .zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

if TYPE_CHECKING:
    from .instructions import Schedule

BUILDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zb-h1": zb_h1,
            "zb-h2": zb_h2, "interleaved-zero-bubble": interleaved_zero_bubble, "zb-v": zb_v, "dualpipe-v": dualpipe_v}
OF_EVERY_RANK = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zero-bubble")
ANY_MICRO_BATCHES = ("gpipe", "1f1b", "zb-h1")
IN_CHUNKS = ("interleaved", "interleaved-zero-bubble")  # how many a rank has is free; a V has two


def schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> "Schedule":
    """Build a Schedule by its name, one of BUILDERS.

    `chunks`: stages of each rank of the two interleaved schedules, by default 2. ValueError for an unknown name, a
    number below 1, and chunks that the schedule cannot have.
    """
    chunks = _chunks(name, chunks)
    return BUILDERS[name](ranks, micro_batches, *[chunks] * (name in IN_CHUNKS))


def idle_time(name: str, ranks: int, forward: float = 1, backward: float = 1, weight: float = 1,
              chunks: int | None = None, rank: int = 0) -> Any:
    """Return the idle time of a rank in closed form (the table above), from as many micro-batches as it says there.

    `forward`, `backward`, `weight`: F, B and W of all stages of a rank. Other ranks than 0 only for those in
    OF_EVERY_RANK. ValueError where no closed form is known: for zb-v and dualpipe-v unless F = B = W.
    """
    v, F, B, W = _chunks(name, chunks), forward, backward, weight
    if rank not in range(ranks):
        raise ValueError(f"rank={rank!r}: expected one of 0 to {ranks - 1}")
    if rank and name not in OF_EVERY_RANK:
        raise ValueError(f"{name}, rank {rank}: a closed form is known of rank 0 alone. Use simulate(schedule).idle")
    if name in ("zb-v", "dualpipe-v") and not F == B == W:
        raise ValueError(f"{name} with F, B, W = {F}, {B}, {W}: a closed form is known of equal ones alone. "
                         f"Use simulate(schedule, costs).idle")
    hops, hidden = ranks - 1 - rank, min(F, W)
    times = {"gpipe": hops * (F + B + W), "1f1b": hops * (F + B + W), "interleaved": hops * (F + B + W) / v,
             "zb-h1": hops * (F + B - hidden), "zb-h2": max(0, hops * (F + B - 2 * hidden)),
             "interleaved-zero-bubble": hops * (F + B - hidden) / v, "zb-v": 0, "dualpipe-v": hops * F / 2}
    return times[name]


def in_flight(name: str, ranks: int, micro_batches: int, rank: int = 0, chunks: int | None = None) -> int:
    """Return how many activations a rank holds at once in closed form (the table above): a stage's, for a micro-batch.

    ValueError for fewer than 2p micro-batches, but for gpipe, 1f1b and zb-h1: `validate` counts.
    """
    v, p, m, r = _chunks(name, chunks), ranks, micro_batches, rank
    if rank not in range(ranks):
        raise ValueError(f"rank={rank!r}: expected one of 0 to {ranks - 1}")
    if m < 2 * p and name not in ANY_MICRO_BATCHES:
        raise ValueError(f"{name}, {m} micro-batches on {p} ranks: the closed form holds from {2 * p}. "
                         f"Use validate(schedule)[rank].peak")
    counts = {"gpipe": m, "1f1b": min(m, p - r), "interleaved": min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
              "zb-h1": min(m, p), "zb-h2": 2 * p - 1, "interleaved-zero-bubble": v * p, "zb-v": 2 * p,
              "dualpipe-v": 2 * p + 1}
    return counts[name]


def _chunks(name, chunks):
    """Stages of a rank, checked."""
    if name not in BUILDERS:
        raise ValueError(f"no schedule {name!r}: expected one of {', '.join(BUILDERS)}")
    fixed = 2 if name in ("zb-v", "dualpipe-v") else 1
    fixed = None if name in IN_CHUNKS else fixed
    if chunks is not None and fixed is not None and chunks != fixed:
        raise ValueError(f"{name} with chunks={chunks!r}: a rank has {fixed} of it. Leave chunks out")
    chunks = chunks if chunks is not None else fixed or 2
    check_sizes(1, 1, chunks)
    return chunks
