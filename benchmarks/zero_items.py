"""What is alive at the peak of a step: sizes that the allocator tells of, and what in a model has such a size."""

import re
from collections import Counter

from refimpl.zero.units import default_units, unit_buckets

LARGEST = 12  # sizes


def live_at_peak(events):
    """Return {bytes of a tensor: bytes of all of this size} of the largest that a region had taken at its highest
    moment, and not freed. `events` are those of `memory.measure`, on a CPU."""
    total = peak = last = 0
    for i, (_, nbytes) in enumerate(events):
        total += nbytes
        if total > peak:
            peak, last = total, i
    live = Counter()
    for _, nbytes in events[: last + 1]:
        live[abs(nbytes)] += nbytes
    return {f"{size:,}": nbytes for size, nbytes in live.most_common(LARGEST) if nbytes}


def names_of(model, world, rows, length):
    """Return {bytes: what has this size}: buckets of units, whole or as gradients, their shards, single parameters'
    gradients, and logits of so many rows of tokens. Layers of equal names but for a number are one. `model`: on any
    device. What is in no unit's or parameter's size is an activation, or a temporary tensor."""
    named, found = list(model.named_parameters()), {}

    def add(nbytes, what):
        names = found.setdefault(f"{nbytes:,}", [])
        names += [] if what in names else [what]

    for bucket in unit_buckets(named, default_units(model), world):
        add(bucket.nbytes, f"{_any(bucket.name)}, whole or its gradients")
        add(bucket.nbytes // world, f"a shard of {_any(bucket.name)}")
    for name, p in named:
        add(p.nbytes, f"gradient of {_any(name)}")
    for name, p in named:
        if p.dim() == 2 and "embed" not in name:
            add(rows * length * len(p) * p.itemsize, f"an activation of {len(p)} features")
    return {size: "; ".join(names) for size, names in found.items()}


def _any(name):
    return re.sub(r"\.\d+\b", ".*", name)
