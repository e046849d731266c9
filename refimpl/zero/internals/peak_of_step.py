"""The peak of a step at stages 1 to 3 in closed form, beside the optimizer's state and activations.

Units 1 … n run one after the other; a more are gathered ahead. Unit k has U_k bytes; a rank's shard of them is S_k. Its
largest layer's gradients have m_k bytes. At stage 3, while unit k's backward runs, these are alive:

    S_1 + … + S_n                    shards of parameters; of 16-bit ones none, which are rounded from their masters
    U_k + U_(k−1) + … + U_(k−a)      units that are whole, or on their way
    G_k                              gradients that autograd has made so far, up to U_k without padding
    W_k                              buckets on the wire: of k+1, k+2, …, as many as `in_flight_bytes` lets be
    S_(k+1) + … + S_n                shards of gradients that have been reduced

and at its end, when its parameters have gone, the bucket U_k that its gradients are moved to, in place of the first
U_k. The peak is the largest sum of all k. At stage 2 parameters are whole, buckets are not of units, and fill while
autograd makes gradients, of which those of one layer are there besides. At stage 1
reduced buckets stay whole, too. A tensor that is used twice, such as an embedding's weight that is the head's, has one
gradient more: it waits in autograd from the head's backward to the embedding's.

Exact for modules that run one after the other, each making all gradients of its own parameters at once, as linear
layers and norms do. `tests/zero/internals/test_peak_of_step.py` holds it to the byte.
"""

import itertools
from collections import Counter

from ..bucket import buckets_of, default_bucket_bytes
from ..reducer import default_in_flight_bytes
from ..units import default_units, modules_of_units, reads_weights_in_backward, unit_buckets
from ..update import LOW

SHARDS, WHOLE = "shards of parameters", "parameters whole or on their way"
FILLING, WIRE = "buckets that fill or stay", "buckets on the wire"
MADE, WAITING, REDUCED = "gradients just made", "gradient of a tensor used twice", "shards of gradients"


def peak_of_step_bytes(model, world_size, stage, *, look_ahead=1, in_flight_bytes=None, bucket_bytes=None, units=None,
                       order=None, outside=()):
    """Return {what: bytes} of parameters and gradients at the peak of a step, the third or a later one.

    Arguments as the engine's; `stage` 1 to 3, else ValueError. `order`: the model's modules in the order of their
    forwards, by default that in which the model has them. At stage 3 only that of units matters. `outside`: parameters
    that the model itself reads after all units, as a head tied by `F.linear(x, self.embedding.weight)` does: at stage 3
    they stay whole until backward has ended.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 1, 2 or 3 (at stage 0 parameters and gradients are whole)")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if stage == 3:
        units = default_units(model) if units is None else units
        modules = modules_of_units([unit for unit in order or units if unit in units])
        buckets = unit_buckets(named, list(modules), world_size)
    else:
        modules = {model: list(order or model.modules())}
        buckets = buckets_of(named, world_size,
                             default_bucket_bytes(named, stage) if bucket_bytes is None else bucket_bytes)
    limit = default_in_flight_bytes(buckets) if in_flight_bytes is None else in_flight_bytes
    step = _SimulatedStep(buckets, stage, limit)
    step.run(modules, look_ahead, list(outside))
    return step.most


class _SimulatedStep:
    """Goes through a step without computing. `now`: bytes that are alive; `most`: those of the peak so far."""

    def __init__(self, buckets, stage, in_flight_bytes):
        self.stage, self.in_flight_bytes, self.buckets = stage, in_flight_bytes, buckets
        self.place = {p: bucket for bucket in buckets for p in bucket.parameters}
        self.missing = {bucket: set(bucket.parameters) for bucket in buckets}  # of those that are not launched
        self.now, self.most, self.wire, self.filling, self.waits = Counter(), {}, [], set(), Counter()

    def look(self):
        """Remember this moment if it is the highest."""
        if sum(self.now.values()) > sum(self.most.values()):
            self.most = {what: nbytes for what, nbytes in self.now.items() if nbytes}

    def run(self, modules, look_ahead, outside):
        """Go through forward, in which only whole parameters change, and backward."""
        self.stay = list(dict.fromkeys(self.place[p] for p in outside)) if self.stage == 3 else []
        own = {unit: list(dict.fromkeys(self.place[p] for p in _parameters(inside) if p in self.place))
               for unit, inside in modules.items()}
        self.uses = Counter(p for inside in modules.values() for p in _parameters(inside))
        self.uses.update(outside)
        whole = self.gathered(own, look_ahead)
        self.make(outside)
        for unit in reversed(modules):
            if unit in whole:
                self.set_whole(whole[unit])
            for module in reversed(modules[unit]):
                self.make([p for p in module._parameters.values() if p in self.place])
            if self.stage == 3:
                self.set_whole([bucket for bucket in whole.get(unit, ()) if bucket not in own[unit]])
                for bucket in own[unit]:
                    self.launch(bucket)

    def gathered(self, own, look_ahead):
        """Go through forward; return {unit: the buckets that are whole when its backward begins}."""
        if self.stage < 3:
            return dict.fromkeys(own, self.buckets)
        released = {(bucket.dtype, bucket.device): bucket.dtype.itemsize for bucket in self.buckets}  # show one element
        held = sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in self.buckets if bucket.dtype not in LOW)
        self.now[SHARDS] = held + sum(released.values())
        gathers = [*own, *(unit for unit in reversed(own) if reads_weights_in_backward(unit))]
        whole = [_whole(own, gathers[i:], look_ahead) for i in range(len(gathers))]
        for buckets in whole[: len(own)]:
            self.set_whole(buckets)
        return dict(zip(gathers[len(own):], whole[len(own):], strict=True))

    def set_whole(self, buckets):
        """Have these buckets' parameters whole, and no others."""
        self.now[WHOLE] = _bytes(dict.fromkeys([*buckets, *self.stay]))
        self.look()

    def make(self, layer):
        """Make a layer's gradients, and put those that are complete into their buckets, one after the other."""
        for p in layer:
            self.uses[p] -= 1
            self.waits[p] += 1
        complete = [p for p in reversed(layer) if not self.uses[p]]  # a bias before its weight
        used_before = _bytes(p for p in complete if self.waits[p] > 1)
        self.now[MADE] = _bytes(complete) + used_before + (self.now[MADE] if self.stage == 3 else 0)  # and sums
        self.now[WAITING] += _bytes(p for p in layer if self.uses[p])
        self.look()
        self.now[MADE], self.now[WAITING] = self.now[MADE] - used_before, self.now[WAITING] - used_before
        for p in complete:
            self.put(p)

    def put(self, p):
        """Put a gradient into its bucket; one that fills it becomes the buffer."""
        bucket = self.place[p]
        if self.stage == 3:  # there it waits for the end of its unit
            self.missing[bucket].discard(p)
            return
        if bucket not in self.filling:
            self.filling.add(bucket)
            self.now[FILLING] += bucket.nbytes
            self.now[MADE] -= p.nbytes * (bucket.numel == p.numel())
        self.look()
        self.now[MADE] -= p.nbytes * (bucket.numel != p.numel())
        self.missing[bucket].discard(p)
        for bucket in itertools.takewhile(lambda bucket: not self.missing[bucket], list(self.missing)):
            self.launch(bucket)

    def launch(self, bucket):
        """Reduce a bucket, if it is complete: its shard is made, and the whole is freed when the collective ends."""
        if self.missing.get(bucket, True):
            return
        del self.missing[bucket]
        if self.stage == 1:  # in place, and it stays
            return
        self.wait_until(self.in_flight_bytes - bucket.nbytes)
        if self.stage == 3:  # gradients move to their bucket, or are it
            self.now[FILLING] += bucket.nbytes
            fills = bucket.parameters[0].numel() == bucket.numel
            self.now[MADE] -= bucket.nbytes * fills
            self.look()
            self.now[MADE] -= 0 if fills else _bytes(bucket.parameters)
        self.now[REDUCED] += bucket.shard_numel * bucket.dtype.itemsize
        self.look()
        self.now[FILLING] -= bucket.nbytes
        self.wire.append(bucket)
        self.wait_until(self.in_flight_bytes)

    def wait_until(self, most):
        """End the oldest collectives until at most so many bytes are on the wire."""
        while self.wire and _bytes(self.wire) > most:
            self.wire.pop(0)
        self.now[WIRE] = _bytes(self.wire)


def _whole(own, units, look_ahead):
    """Return the buckets that are whole when the first of these units computes: its own, and what is gathered ahead."""
    found, ahead = list(own[units[0]]), 0
    for before, unit in zip(units, units[1:], strict=False):
        ahead += unit is not before
        for bucket in own[unit]:
            if ahead > look_ahead or bucket in own[units[0]]:
                return found
            found.append(bucket)
    return list(dict.fromkeys(found))


def _parameters(modules):
    return [p for module in modules for p in module._parameters.values() if p is not None]


def _bytes(things):
    return sum(each.nbytes for each in things)
