"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import the_peak_of_zero_3 as page
from refimpl.zero.internals.peak_of_step import peak_of_step_bytes

# --- first -----------------------------------------------------------------------------------------------------------


def predict(layers, nbytes, world_size, ahead):
    shards, whole = layers * nbytes // world_size, min(layers, 1 + ahead) * nbytes
    gathers, reductions = 2 * layers - 1, layers  # the last layer stays for backward
    return shards + whole, (gathers + reductions) * (world_size - 1) * nbytes // world_size


def by_replay(layers, nbytes, world_size, ahead):
    """Go through a step, layer by layer."""
    gathers = [*range(layers), *reversed(range(layers - 1))]
    most = max(len(set(gathers[i : i + 1 + ahead])) for i in range(len(gathers)))
    sent = sum(nbytes - nbytes // world_size for _ in [*gathers, *range(layers)])
    return layers * nbytes // world_size + most * nbytes, sent


def by_closed_forms(layers, nbytes, world_size, ahead):
    width = int((nbytes // 4) ** 0.5)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    peak = peak_of_step_bytes(model, world_size, 3, look_ahead=ahead, in_flight_bytes=0)
    whole = peak.get("parameters, whole", min(layers, 1 + ahead) * nbytes)
    return [layers * nbytes / world_size + whole, (3 * layers - 1) * nbytes * (world_size - 1) / world_size]


def with_fault(layers, nbytes, n, ahead, *, shards=True, computing=1, limit=True, gathers=None, of=1):
    whole = computing + ahead
    held = (layers * nbytes // n if shards else 0) + (min(layers, whole) if limit else whole) * nbytes
    return held, (2 * layers - 1 + layers if gathers is None else gathers(layers)) * (n - of) * nbytes // n


# --- second ----------------------------------------------------------------------------------------------------------


def highest(units, world_size):
    moments = []
    for k, unit in enumerate(units):
        before = units[k - 1] if k > 0 else 0
        moments.append(2 * unit + before + sum(units[k + 1:]) // world_size)
    return sum(units) // world_size + max(moments)


def from_the_end(units, world_size):
    """Go through backward, with what is alive in each moment."""
    most, gradients = 0.0, 0.0
    for unit, before in zip(reversed(units), [*reversed(units[:-1]), 0], strict=True):
        most = max(most, unit + before + unit + gradients)
        gradients += unit / world_size
    return most + sum(units) / world_size


def by_simulation(units, world_size):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(unit // 4, 1, bias=False) for unit in units))
    peak = peak_of_step_bytes(model, world_size, 3, in_flight_bytes=0, units=list(model))
    return sum(peak.values()) - 4  # the one element that released parameters show


def faulty(units, n, *, reduced=True, other=-1, both=2, shards=1, of_all=False, which=max):
    before = [units[k + other] if 0 <= k + other < len(units) else 0 for k in range(len(units))]
    return shards * sum(units) // n + which(
        both * unit + before[k] + (sum(units if of_all else units[k + 1:]) // n if reduced else 0)
        for k, unit in enumerate(units))


def of_the_largest(units, world_size):
    """As if the largest unit decided, whatever is whole beside it."""
    return sum(units) // world_size + 3 * max(units)


def at_the_largest(units, n):
    k = units.index(max(units))
    return sum(units) // n + 2 * units[k] + (units[k - 1] if k else 0) + sum(units[k + 1:]) // n


ANSWERS = {
    page.first: Answers(
        right=[predict, by_replay, by_closed_forms],
        wrong=[
            (partial(with_fault, shards=False), "you say 16,384 at most, a rank has 32,772 bytes of parameters"),
            (partial(with_fault, computing=0), "you say 16,384 at most, a rank has 32,772 bytes of parameters"),
            (partial(with_fault, computing=2), "you say 49,152 at most, a rank has 32,772 bytes of parameters"),
            (partial(with_fault, limit=False), "3 layers of 16,384 bytes, 4 ranks, 9 ahead: you say 176,128 at most"),
            (lambda layers, nbytes, n, ahead: predict(layers, 16384, n, ahead), "8 layers of 4,096 bytes, 2 ranks"),
            (partial(with_fault, gathers=lambda layers: 3 * layers),
             "the bytes held are right; you say 147,456 are sent, a rank sends 135,168"),
            (partial(with_fault, gathers=lambda layers: 2 * layers),
             "the bytes held are right; you say 98,304 are sent, a rank sends 135,168"),
            (partial(with_fault, gathers=lambda layers: 2 * layers - 1), "you say 86,016 are sent"),
            (partial(with_fault, gathers=lambda layers: 3 * layers - 2), "you say 122,880 are sent"),
            (partial(with_fault, of=0), "you say 180,224 are sent, a rank sends 135,168"),
            (lambda layers, nbytes, n, ahead: layers * nbytes, "expected 2 values")],
        same=("layers, 1 + ahead → 1 + ahead, layers",),
    ),
    page.second: Answers(
        right=[highest, from_the_end, by_simulation],
        wrong=[
            (of_the_largest, "4 ranks: you say 265,216 at most, a rank has 298,372 bytes of parameters and gradients"),
            (at_the_largest, "bytes of parameters and gradients"),
            (partial(faulty, reduced=False), "bytes of parameters and gradients"),
            (partial(faulty, of_all=True), "bytes of parameters and gradients"),
            (partial(faulty, other=1), "bytes of parameters and gradients"),
            (partial(faulty, both=1), "4 ranks: you say"),
            (partial(faulty, both=3), "4 ranks: you say"),
            (partial(faulty, shards=0), "4 ranks: you say"),
            (partial(faulty, which=lambda moments: list(moments)[-1]), "bytes of parameters and gradients"),
            (partial(faulty, which=lambda moments: next(iter(moments))), "bytes of parameters and gradients"),
            (lambda units, n: sum(units), "4 ranks: you say")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
