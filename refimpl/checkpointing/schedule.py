"""Which stages of a chain to recompute, so that a step fits a budget and takes the least time: a dynamic program.

After "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory"
(Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019), section 4, with one change that makes the bytes those of
PyTorch: a stage's output is not held for its own backward.

    x_i            output of stage i, a_i bytes; x_0 is the input of the chain; δ_i its gradient, d_i bytes
    F∅(i)          x_{i-1} → x_i and nothing kept. At its peak p_i bytes besides x_{i-1}
    Fall(i)        the same, and keeps s_i bytes for backward. At its peak q_i bytes besides x_{i-1}
    B(i)           x_{i-1}, s_i, δ_i → δ_{i-1}. At its peak r_i bytes besides x_{i-1}, those three included

A value that was kept stays until backward has used it: "persistent" schedules, as in the paper. (Keeping a value for a
while and dropping it before its backward can be faster where stages differ much, and is not looked for: by up to a
fifth on random chains of five stages, by nothing on a GPT's equal blocks.)

T(s, t, m) is the least time for forward and backward of the stages s … t, given x_{s-1} (not counted) and δ_t
(counted), within m bytes:

    keep s         f_s + b_s + T(s+1, t, m − s_s − a_s)                    if m ≥ max(d_t + q_s, r_s)
    recompute      f_s + … + f_{j-1} + T(j, t, m − a_{j-1}) + T(s, j−1, m)       if m ≥ d_t + p_s, d_t + a_{i-1} + p_i
    s … j−1        for the best j in s+1 … t                                    (s < i < j)

As a function of m, T is a staircase; it is computed exactly, as the list of its steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..common.keyword_options import check_options
from .chain import stages_of


@dataclass(frozen=True)
class Costs:
    """A chain of n stages in numbers: times in any unit, bytes as in the text above. Sequences of n; see
    `optimal_schedule` for what is assumed of those not given."""

    forward_times: tuple
    backward_times: tuple
    output_bytes: tuple
    activation_bytes: tuple
    gradient_bytes: tuple
    forward_peaks: tuple
    saving_peaks: tuple
    backward_peaks: tuple
    input_bytes: int = 0

    def __len__(self) -> int:
        return len(self.forward_times)


COSTS = tuple(Costs.__dataclass_fields__)  # what `costs` takes


@dataclass(frozen=True)
class Schedule:
    """What to do: `plan` for `run_chain`, and what it takes: `time`, and `peak` in bytes (the input included).

    `forwards`: how often each stage runs forward in a step, 1 for one that is kept.
    """

    plan: list
    time: float
    peak: int
    forwards: list = field(repr=False)


def costs(forward_times: Sequence[float], activation_bytes: Sequence[int], output_bytes: Sequence[int] | None = None, *,
          backward_times: Sequence[float] | None = None, gradient_bytes: Sequence[int] | None = None,
          forward_peaks: Sequence[int] | None = None, saving_peaks: Sequence[int] | None = None,
          backward_peaks: Sequence[int] | None = None, input_bytes: int = 0) -> Costs:
    """Return the chain as Costs. Where not given: outputs of 0 bytes, backward twice as long as forward, gradients as
    large as outputs, no temporaries.

    `activation_bytes`: what autograd keeps of each stage, its input not counted. ValueError for a number that is
    negative or not finite, or for sequences of different lengths.
    """
    n = len(forward_times)
    if n == 0:
        raise ValueError("forward_times is empty: expected a chain of at least one stage")
    a = [0] * n if output_bytes is None else output_bytes
    d = a if gradient_bytes is None else gradient_bytes
    given = {
        "forward_times": forward_times,
        "backward_times": [2 * f for f in forward_times] if backward_times is None else backward_times,
        "output_bytes": a, "activation_bytes": activation_bytes, "gradient_bytes": d,
        "forward_peaks": a if forward_peaks is None else forward_peaks,
        "saving_peaks": saving_peaks, "backward_peaks": backward_peaks}
    for name, values in given.items():
        if values is not None and len(values) != n:
            raise ValueError(f"{name} has {len(values)} entries: expected {n}, one for each of forward_times")
    if saving_peaks is None:
        given["saving_peaks"] = [s + x for s, x in zip(activation_bytes, a, strict=True)]
    if backward_peaks is None:  # δ_0 is that of the input
        before = [input_bytes, *d[:-1]]
        given["backward_peaks"] = [s + x + y for s, x, y in zip(activation_bytes, d, before, strict=True)]
    for name, values in [*given.items(), ("input_bytes", [input_bytes])]:
        for i, value in enumerate(values):
            if not 0 <= value < float("inf"):  # NaN is neither
                raise ValueError(f"{name}[{i}] is {value!r}: expected a finite number, 0 or more")
    return Costs(**{name: tuple(values) for name, values in given.items()}, input_bytes=input_bytes)


def optimal_schedule(forward_times: Sequence[float], activation_bytes: Sequence[int],
                     output_bytes: Sequence[int] | None = None, *, budget: int, **more: Any) -> Schedule:
    """Find the Schedule of least time whose peak is within `budget` bytes (the input included).

    The costs are given as to `costs`. Of equal times, the schedule with the smallest peak is taken. Raises ValueError
    for a budget that is not a positive number and for one that no schedule meets (the message says the smallest that
    one does), and TypeError for a keyword that `costs` does not have.
    """
    check_options(more, COSTS, "optimal_schedule")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise ValueError(f"budget={budget!r}: expected a positive number of bytes")
    program = Program(costs(forward_times, activation_bytes, output_bytes, **more))
    return program.schedule(budget)


def time_peak_curve(*args: Any, **more: Any) -> list[tuple[int, float]]:
    """List all schedules worth having as [(peak, time), …], from the smallest peak on: less time only for more bytes.

    Peaks are in bytes, as `plan_peak` has them; times in the unit of the costs. Takes and raises what `costs` does;
    TypeError for another keyword.
    """
    check_options(more, COSTS, "time_peak_curve")
    return Program(costs(*args, **more)).curve()


class Program:
    """Computes the staircases T(s, t, ·) of all sub-chains once, and from them a schedule for any budget."""

    def __init__(self, chain):
        self.chain = chain
        self._stairs = {}  # (s, t), from 0 -> (bytes ascending, times descending)
        n = len(chain)
        for length in range(1, n + 1):  # short ones first: longer ones are made of them
            for s in range(n - length + 1):
                options = [self._keep(s, s + length - 1)]
                options += [self._recompute(s, j, s + length - 1) for j in range(s + 1, s + length)]
                self._stairs[s, s + length - 1] = _lowest(options)

    def _keep(self, s, t):
        """Return the staircase of the stages s … t when stage s keeps what it saves."""
        c = self.chain
        floor = max(c.gradient_bytes[t] + c.saving_peaks[s], c.backward_peaks[s])
        time = c.forward_times[s] + c.backward_times[s]
        if s == t:
            return np.array([floor]), np.array([time])
        nbytes, times = self._stairs[s + 1, t]
        return np.maximum(nbytes + c.activation_bytes[s] + c.output_bytes[s], floor), times + time

    def _recompute(self, s, j, t):
        """Return the staircase of the stages s … t when s … j−1 are recomputed."""
        c = self.chain
        floor = c.gradient_bytes[t] + max(
            c.forward_peaks[i] + (c.output_bytes[i - 1] if i > s else 0) for i in range(s, j))
        (right, right_times), (left, left_times) = self._stairs[j, t], self._stairs[s, j - 1]
        right = right + c.output_bytes[j - 1]
        # only where one of the two staircases steps down
        nbytes = np.unique(np.maximum(np.concatenate((right, left)), max(floor, right[0], left[0])))
        times = (right_times[np.searchsorted(right, nbytes, "right") - 1]
                 + left_times[np.searchsorted(left, nbytes, "right") - 1])
        return nbytes, times + sum(c.forward_times[s:j])

    def curve(self):
        """Return [(peak, time), …] of the whole chain."""
        nbytes, times = self._stairs[0, len(self.chain) - 1]
        return [(m + self.chain.input_bytes, time) for m, time in zip(nbytes.tolist(), times.tolist(), strict=True)]

    def schedule(self, budget):
        """Return the Schedule of least time within `budget` bytes; ValueError if there is none."""
        fitting = [point for point in self.curve() if point[0] <= budget]
        if not fitting:
            raise ValueError(f"budget={budget:,} bytes: no schedule of these {len(self.chain)} stages peaks below "
                             f"{self.curve()[0][0]:,} bytes, the smallest feasible budget")
        peak, time = fitting[-1]
        plan = self._plan(0, len(self.chain) - 1, peak - self.chain.input_bytes)
        return Schedule(plan, time, peak, forwards(plan))

    def _plan(self, s, t, m):
        """Return the plan of the stages s … t whose time is T(s, t, m)."""
        if s > t:
            return []
        options = [(_at(self._keep(s, t), m), s)]
        options += [(_at(self._recompute(s, j, t), m), j) for j in range(s + 1, t + 1)]
        _, j = min(options)  # of equal times the first: keep rather than recompute
        if j == s:
            return [s, *self._plan(s + 1, t, m - self.chain.activation_bytes[s] - self.chain.output_bytes[s])]
        region = tuple(self._plan(s, j - 1, m))
        return [region, *self._plan(j, t, m - self.chain.output_bytes[j - 1])]


def _lowest(options):
    """Return the lower envelope of staircases: the least time of all of them, at the bytes where it decreases."""
    nbytes = np.concatenate([m for m, _ in options])
    times = np.concatenate([time for _, time in options])
    order = np.lexsort((times, nbytes))  # by bytes; of equal bytes the fastest first
    nbytes, times = nbytes[order], np.minimum.accumulate(times[order])
    first = np.r_[True, times[1:] < times[:-1]]
    return nbytes[first], times[first]


def _at(stairs, m):
    """Return the time of a staircase at m bytes; infinity below its first step."""
    nbytes, times = stairs
    step = np.searchsorted(nbytes, m, "right") - 1
    return times[step] if step >= 0 else np.inf


def forwards(plan, around=1):
    """Count how often each stage of a plan runs forward: once, and once more for each region around it."""
    counts = []
    for item in plan:
        counts += forwards(item, around + 1) if isinstance(item, tuple) else [around]
    return counts


def plan_peak(chain: Costs, plan: Sequence[Any]) -> int:
    """Predict the peak of a step that runs `plan` on a chain of Costs, in bytes, with the chain's input.

    Takes any plan, not only the best one: a nested list of stages, as `run_chain` does. Weights, their gradients and
    optimizer state are not in it.
    """
    return chain.input_bytes + _peak(chain, list(plan), len(chain) - 1)


def _peak(chain, plan, t):
    """Return the peak of the stages in `plan`, the last of which is t, with δ_t and without the first one's input."""
    if not plan:
        return 0
    item, rest = plan[0], plan[1:]
    if not isinstance(item, tuple):
        # an output is not held for its own backward
        after = chain.activation_bytes[item] + chain.output_bytes[item] if rest else 0
        return max(chain.gradient_bytes[t] + chain.saving_peaks[item], chain.backward_peaks[item],
                   after + _peak(chain, rest, t))
    inside = list(stages_of(item))
    dropping = max(chain.forward_peaks[i] + (chain.output_bytes[i - 1] if i > inside[0] else 0) for i in inside)
    return max(chain.gradient_bytes[t] + dropping,
               chain.output_bytes[inside[-1]] + _peak(chain, rest, t) if rest else 0,
               _peak(chain, list(item), inside[-1]))


def plan_time(chain: Costs, plan: Sequence[Any]) -> float:
    """Predict the time of a step that runs `plan` on a chain of Costs: Σᵢ kᵢ·fᵢ + Σᵢ bᵢ, in the unit of its times.

    Stage i runs its forward kᵢ times, once at first and once in each recomputation.
    """
    again = zip(forwards(plan), chain.forward_times, strict=True)
    return sum(n * f for n, f in again) + sum(chain.backward_times)
