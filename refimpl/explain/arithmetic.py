"""What the arithmetic leaves out: from "16 bytes × parameters" to the peak, in items that sum to it.

The arithmetic is that of "ZeRO" (Rajbhandari et al. 2020), section 3.1: for each trained parameter a weight, a gradient
of its type, and what the optimizer keeps; for a frozen one the weight alone.
"""

from collections import Counter
from dataclasses import dataclass

from ..common.ledger import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES, human
from .kinds import OTHER


@dataclass(frozen=True)
class Arithmetic:
    """`expected` bytes, `terms` that say how they come about, and the rest of the `peak`: [(name, bytes)].

    `expected` + the rest = `peak`, to the byte. `beyond`: bytes on a CUDA device that no tensor has: [(name, bytes)].
    """

    peak: int
    expected: int
    terms: str
    rest: list
    beyond: list

    def __str__(self):
        lines = [f"{self.terms} = {self.expected:,} bytes ({human(self.expected)})",
                 f"your run took {self.peak:,} bytes ({human(self.peak)}); the rest is"]
        width = max([len(f"{nbytes:+,}") for _, nbytes in self.rest + self.beyond], default=0)
        lines += [f"  {nbytes:>+{width},}  {name}" for name, nbytes in self.rest]
        if self.beyond:
            lines += ["and on the device, in no tensor"]
            lines += [f"  {nbytes:>+{width},}  {name}" for name, nbytes in self.beyond]
        return "\n".join(lines)


def arithmetic(timeline):
    """Lay a recorded peak out beside what 16 bytes × parameters (or whatever they come to here) would be."""
    held = Counter()
    kinds = timeline.kinds
    for i in timeline.alive(timeline.peak_row).tolist():
        held[kinds[i]] += int(timeline.nbytes[i])
    weights, gradients, states, terms = _expected(timeline)
    rest = [("parameters in other types or outside the models that ran", held.pop(PARAMETERS, 0) - weights),
            ("gradients that are not there at the peak" if held[GRADIENTS] < gradients else "gradients beyond one each",
             held.pop(GRADIENTS, 0) - gradients),
            ("optimizer state that is not there at the peak" if held[OPTIMIZER_STATE] < states else
             "optimizer state beyond that: counters", held.pop(OPTIMIZER_STATE, 0) - states),
            ("buffers", held.pop(BUFFERS, 0)), ("the batch", held.pop(INPUTS, 0))]
    other = held.pop(OTHER, 0) + held.pop(TEMPORARIES, 0)
    rest += sorted(held.items(), key=lambda item: -item[1])
    expected = weights + gradients + states
    known = expected + sum(nbytes for _, nbytes in rest)
    rest.append(("other temporaries: what operations returned and nothing keeps", other))
    rest.append(("resized storages", timeline.peak - known - other))
    return Arithmetic(timeline.peak, expected, terms, [(name, n) for name, n in rest if n], _beyond(timeline))


def _expected(timeline):
    """(bytes of weights, of gradients, of optimizer state, the terms in words) by the arithmetic, for the models that
    live at the peak."""
    alive, counts, sizes = set(timeline.alive(timeline.peak_row).tolist()), Counter(), Counter()
    parameters = (each for model in timeline.recording.models for each in model.parameters)
    for number, elements, size, is_trained in parameters:
        if number is None or number in alive:
            counts[is_trained] += elements
            sizes[size] += elements
    trained, frozen = counts[True], counts[False]
    weights = sum(size * count for size, count in sizes.items())
    state = sum(int(timeline.nbytes[i]) for i in timeline.where(OPTIMIZER_STATE)
                if timeline.freed[i] >= timeline.rows and timeline.records[i].shape)  # one number alone is a counter
    if not trained:
        return weights, 0, 0, f"{frozen:,} frozen parameters"
    each, beside = divmod(state, trained)
    main = max(sizes, key=lambda size: sizes[size]) if len(sizes) == 1 else None
    if main is None:  # several types: those that are trained are not told apart
        gradients = round(weights * trained / (trained + frozen))
        kept = f"{state:,} bytes of optimizer state" if beside else f"{each} bytes of optimizer state × {trained:,}"
        return weights, gradients, state, (f"weights of {trained + frozen:,} parameters, gradients of {trained:,}, "
                                           f"{kept}")
    terms = f"{2 * main + (0 if beside else each)} bytes × {trained:,} {'trained ' if frozen else ''}parameters"
    terms += f" + {main} bytes × {frozen:,} frozen ones" if frozen else ""
    terms += f" + {state:,} bytes of optimizer state" if beside else ""  # not as much for each: factored, or of some
    return weights, main * trained, state, terms


def _beyond(timeline):
    """What the caching allocator holds beside tensors, if the run was on CUDA."""
    cuda = timeline.recording.cuda
    if not cuda or not timeline.trace.device.startswith("cuda"):
        return []
    found = [("workspaces of kernels and libraries, at the allocator's own peak", cuda["requested"] - timeline.peak),
             ("rounding to blocks of 512 bytes", cuda["allocated"] - cuda["requested"]),
             ("reserved and not allocated: fragmentation and cached blocks", cuda["reserved"] - cuda["allocated"])]
    return [(name, nbytes) for name, nbytes in found if nbytes]
