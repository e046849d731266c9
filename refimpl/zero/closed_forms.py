"""ZeRO in closed form: bytes of model states on a rank, and bytes that it sends in a step, for every stage.

With Ψ parameters, N ranks, and p, g and k bytes of a parameter, its gradient and its optimizer state:

    stage                  bytes on each rank          elements on the wire in a step of m micro-batches
    0  DataParallel        Ψ · (p + g + k)             2Ψ                 all_reduce
    1  Zero1               Ψ · (p + g + k/N)           2Ψ                 reduce_scatter, all_gather
    2  Zero2               Ψ · (p + (g + k)/N)         (m + 1)Ψ           m reduce_scatter, all_gather
    3  Zero3               Ψ · (p + g + k)/N           3mΨ                m of: two all_gather, reduce_scatter

each times (N−1)/N on the wire. In hybrid sharding (`hybrid`) on N = S · R ranks, bytes and elements are those of S
ranks, and each reduce_scatter is followed by an all_reduce of 2(R−1)/R · Ψ/S elements between the replicas.
"ZeRO" (Rajbhandari et al. 2020), figure 1 and sections 5 and 7. The functions below
count the padding of buckets, Adam's step counters and the checks between ranks, too, and are exact.
"""

from collections import Counter

import torch

from ..comm.agreement import agreement_traffic
from ..comm.traffic import Traffic, ring_traffic
from ..common.ledger import Ledger
from ..common.state_bytes import STATES
from ..saving.coverage import file_of
from ..saving.dtype_names import part_name
from ..saving.durable import safetensors_bytes, widest_first
from ..sharding import spec_of
from .bucket import buckets_of, default_bucket_bytes
from .units import (
    default_units,
    frozen_buckets,
    large_heads,
    parameters_of_units,
    reads_weights_in_backward,
    unit_buckets,
)
from .update import LOW

STAGES = (0, 1, 2, 3)
KEPT = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"),
        "adamw": ("exp_avg", "exp_avg_sq")}  # of each element
GENERATORS = {"cpu": 5056, "cuda": 16}  # bytes of the state of torch's random number generators


def paper_bytes(parameters, world_size, stage, weight=2, gradient=2, state=12):
    """Return the bytes of model states on each rank by the formulas above, without padding: with the defaults those of
    the paper's table 1, mixed-precision Adam. ValueError for a stage that is not 0 to 3."""
    _check_stage(stage)
    N = world_size
    share = [part / (N if stage >= needed else 1) for part, needed in ((weight, 3), (gradient, 2), (state, 1))]
    return parameters * sum(share)


def model_state_bytes(model, world_size, stage, *, rank=0, optimizer="adamw", bucket_bytes=None, units=None,
                      persistence_threshold=0, reduce_dtype=None, device="cpu"):
    """Return a Ledger (bytes) of the model states on `rank` after a backward, with nothing in flight.

    `model`: as an engine takes it, of any size on the "meta" device; the other arguments as the engine's. `device`: on
    "cuda" Adam's counters are not counted, which are on the host. In hybrid
    sharding `world_size` and `rank` are those of the group that cuts the states. ValueError for an unknown stage or
    optimizer.
    """
    buckets = _layout(model, world_size, stage, bucket_bytes, units, persistence_threshold)
    if optimizer not in STATES:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(STATES)}")
    parameters = gradients = states = 0
    placeholders = {}  # one element of each dtype, which released parameters expand
    for bucket in buckets:
        low, shard = bucket.dtype in LOW, bucket.shard_numel
        stays = all(slot.parameter.numel() < persistence_threshold for slot in bucket.slots)
        rounded = stage == 3 and low and not stays  # for each gather, from the master
        held = bucket.numel * (stage < 3 or stays) + shard * (stage == 3 and not rounded)
        parameters += held * bucket.dtype.itemsize
        placeholders |= {(bucket.dtype, bucket.device): bucket.dtype.itemsize} if stage == 3 and not stays else {}
        cut = stage >= 2 or stage == 1 and reduce_dtype not in (None, bucket.dtype)  # the buffer is freed
        gradients += shard * (reduce_dtype or bucket.dtype).itemsize if cut else bucket.nbytes
        mine = ([(slot.end - slot.first) for slot in bucket.slots] if stage == 0 else
                [piece.end - piece.first for piece in bucket.pieces(rank)])
        itemsize = 4 if low and stage else bucket.dtype.itemsize
        states += (4 * shard if low and stage else 0) + STATES[optimizer] * itemsize * sum(mine)
        # a counter of steps for each piece, which for a GPU's pieces is in host memory
        states += 4 * len(mine) * (optimizer in ("adam", "adamw") and torch.device(device).type == "cpu")
    frozen = _frozen_layout(model, world_size, stage, units, persistence_threshold)
    placeholders |= {(bucket.dtype, bucket.device): bucket.dtype.itemsize for bucket in frozen}
    in_shards = {slot.parameter for bucket in frozen for slot in bucket.slots}
    rest = [p for p in model.parameters() if not p.requires_grad and p not in in_shards]
    parameters += sum(placeholders.values()) + sum(p.nbytes for p in rest)
    parameters += sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in frozen)
    return Ledger({"parameters": parameters, "gradients": gradients,
                   "optimizer state": states})


def start_bytes(model, world_size, *, units=None, persistence_threshold=0):
    """Return the bytes (parameters, masters and buffers) that `Zero3` holds at its peak while it gives a model on the
    meta device its values by a function: max_i (S₁ + … + Sᵢ + Uᵢ), the shards so far and one whole unit, or the masters
    that then take the place of 16-bit shards. Temporary tensors of that function come on top."""
    units = default_units(model) if units is None else units
    trained = _layout(model, world_size, 3, None, units, persistence_threshold)
    buckets = [*trained, *frozen_buckets(model, units, world_size, persistence_threshold)]
    place = {p: bucket for bucket in buckets for p in bucket.parameters}
    held = peak = sum(x.nbytes for x in (*model.parameters(), *model.buffers()) if x not in place)
    cut, expanded = set(), set()  # buckets; dtypes of which one element stands for all that is released
    for parameters in parameters_of_units(units).values():
        whole = dict.fromkeys(place[p] for p in parameters if p in place)
        while whole:
            bucket = next(iter(whole))
            stays = all(p.numel() < persistence_threshold for p in bucket.parameters)
            held += bucket.shard_numel * bucket.dtype.itemsize if bucket not in cut else 0
            waiting = {each.dtype for each in buckets if each not in cut and each not in whole}
            peak = max(peak, held + sum(each.nbytes for each in whole) + _elements(waiting) + _elements(expanded))
            held += bucket.nbytes if stays and bucket not in cut else 0
            expanded |= set() if stays else {bucket.dtype}
            cut.add(bucket)
            del whole[bucket]
    stay = [all(p.numel() < persistence_threshold for p in bucket.parameters) for bucket in trained]
    for bucket, stays in sorted(zip(trained, stay, strict=True), key=lambda pair: pair[1]):
        if bucket.dtype in LOW:  # its master, in place of its shard unless it stays whole
            peak = max(peak, held + 4 * bucket.shard_numel + _elements(expanded))
            held += (4 if stays else 2) * bucket.shard_numel
    return max(peak, held + _elements(expanded))


def _elements(dtypes):
    return sum(dtype.itemsize for dtype in dtypes)


def step_traffic(model, world_size, stage, *, rank=0, micro_batches=1, clips=0, bucket_bytes=None, units=None,
                 persistence_threshold=0, reduce_dtype=None):
    """Return the Traffic (bytes by collective) that `rank` sends in one step; for stage 3 in the second or a later one.

    Stages 0 and 1 with `no_sync` around all micro-batches but the last. Stage 3 for units that run one after the other
    in the order of `units`. Each is gathered twice for a micro-batch. These are gathered once: the last one, since
    backward begins where forward ends, unless it is a large head (`units.large_heads`), which is freed in between; an
    `nn.Embedding`, since its gradient needs indices alone; and units before the first that has something to train.
    """
    N, buckets = world_size, _layout(model, world_size, stage, bucket_bytes, units, persistence_threshold)
    wire = {bucket: bucket.numel * (reduce_dtype or bucket.dtype).itemsize for bucket in buckets}
    tensors = sum(len(bucket.slots) for bucket in buckets)
    sent = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0)
    checks = agreement_traffic(N, rank, tensors, micro_batches * (2 if stage == 3 else 1) + 1, clips)
    sent["all_reduce"] += checks["all_reduce"]
    sent["all_gather"] += checks["all_gather"]
    for bucket in buckets:
        if stage == 0:
            itemsize = (reduce_dtype or bucket.dtype).itemsize
            sent["all_reduce"] += ring_traffic("all_reduce", wire[bucket], N, rank, itemsize)
            continue
        sent["reduce_scatter"] += (micro_batches if stage >= 2 else 1) * ring_traffic(
            "reduce_scatter", wire[bucket], N)
        stays = all(slot.parameter.numel() < persistence_threshold for slot in bucket.slots)
        if stage < 3 or stays:
            sent["all_gather"] += ring_traffic("all_gather", bucket.nbytes, N)
    if stage == 3:
        frozen = _frozen_layout(model, N, stage, units, persistence_threshold)
        gathered = gathers(model, [*buckets, *frozen], units, persistence_threshold)
        sent["all_gather"] += micro_batches * sum(ring_traffic("all_gather", bucket.nbytes, N) for bucket in gathered)
    return Traffic(sent)


def hybrid_traffic(model, shards, replicas, stage, *, rank=0, micro_batches=1, clips=0, bucket_bytes=None,
                   units=None, persistence_threshold=0, reduce_dtype=None):
    """Return {"shards", "replicas", "all": Traffic}: what `rank` of S · R sends in one step of hybrid sharding within
    its group of S = `shards` ranks, to its R = `replicas`, and in checks among all ranks.

    Stages 1 to 3. Rank s + S · r is shard s of replica r, as in a Mesh. Within the group it is the traffic of
    `step_traffic` on S ranks, without the checks. Each reduction of a bucket of n elements then sends 2(R−1)/R · n/S
    between replicas: once a step at stage 1, at stages 2 and 3 in each micro-batch.
    """
    given = {"bucket_bytes": bucket_bytes, "units": units, "persistence_threshold": persistence_threshold}
    buckets = _layout(model, shards, stage, **given)
    tensors, passes = sum(len(bucket.slots) for bucket in buckets), micro_batches * (2 if stage == 3 else 1) + 1
    within = step_traffic(model, shards, stage, rank=rank % shards, micro_batches=micro_batches,
                          reduce_dtype=reduce_dtype, **given)
    itemsizes = {bucket: (reduce_dtype or bucket.dtype).itemsize for bucket in buckets}
    between = sum(ring_traffic("all_reduce", bucket.shard_numel * itemsizes[bucket], replicas, rank // shards,
                               itemsizes[bucket]) for bucket in buckets)
    return {"shards": within - agreement_traffic(shards, rank % shards, tensors, passes),
            "replicas": Traffic(all_reduce=between * (micro_batches if stage >= 2 else 1)),
            "all": Traffic(agreement_traffic(shards * replicas, rank, tensors, passes, clips))}


def saved_bytes(model, world_size, stage, *, optimizer="adamw", bucket_bytes=None, units=None,
                persistence_threshold=0, cuda=False, ranks=None):
    """Return {file: bytes} of what `save` writes after a step: Ψ · (h + k) bytes, h and k those of an element as it is
    held and of its optimizer's state, and headers, states of random number generators, and what is not trained.

    Arguments as of `model_state_bytes`; `cuda`: whether ranks have a GPU. `ranks`: of a model that tensor parallelism
    has split, the numbers in the world of the ranks with the same part, `mesh.ranks("dp")`. These files alone are
    counted, with what these ranks own. The manifest, which is text, is not counted.
    """
    ranks = range(world_size) if ranks is None else ranks
    buckets = _layout(model, world_size, stage, bucket_bytes, units, persistence_threshold)
    held = {bucket: torch.float32 if stage and bucket.dtype in LOW else bucket.dtype for bucket in buckets}
    generators = [(f"rng/{kind}", torch.uint8, (GENERATORS[kind],)) for kind in ("cpu", *["cuda"] * cuda)]
    keys = "parameters", *(f"optimizer/{kept}" for kept in KEPT[optimizer])
    frozen, persistent = _frozen_layout(model, world_size, stage, units, persistence_threshold), model.state_dict()
    in_shards = {slot.name for bucket in frozen for slot in bucket.slots}
    rest = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and name not in in_shards]
    rest += [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    files = {}
    for i, rank in enumerate(ranks):
        pieces = [(piece.slot.name, piece.slot.parameter, held.get(bucket, bucket.dtype), piece.end - piece.first,
                   keys if bucket in held else ("rest",)) for bucket in (*buckets, *frozen)
                  for piece in bucket.pieces(i)]
        pieces += [(name, x, x.dtype, x.numel(), ("rest",)) for name, x in rest if not i and x.numel()]
        files[file_of(rank)] = _parts(pieces, ranks) + generators
    return {file: safetensors_bytes(widest_first(specs, lambda spec: spec[1])) for file, specs in files.items()}


def _parts(pieces, ranks):
    """Return [(key in a file, dtype, shape)] of those of [(name, parameter, dtype, elements, keys)] of which the first
    holder is one of these ranks."""
    found, count = [], Counter()
    for name, parameter, dtype, elements, keys in pieces:
        spec = spec_of(name, parameter)
        if not spec.replicas or min(spec.replicas) in ranks:
            found += [(f"{key}/{part_name(spec.name, count[spec.name])}", dtype, (elements,)) for key in keys]
            count[spec.name] += 1
    return found


def _layout(model, world_size, stage, bucket_bytes, units, persistence_threshold):
    _check_stage(stage)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if stage < 3:
        bucket_bytes = default_bucket_bytes(named, stage) if bucket_bytes is None else bucket_bytes
        return buckets_of(named, world_size, bucket_bytes)
    return unit_buckets(named, default_units(model) if units is None else units, world_size, persistence_threshold)


def _frozen_layout(model, world_size, stage, units, persistence_threshold):
    units = default_units(model) if units is None else units
    return frozen_buckets(model, units, world_size, persistence_threshold) if stage == 3 else []


def gathers(model, buckets, units=None, persistence_threshold=0):
    """Return the buckets, of all that stage 3 has, that one forward and backward gather, in order; one used twice in a
    row is gathered once, unless it is a large head (`units.large_heads`). `step_traffic` says for which models."""
    units = default_units(model) if units is None else units
    parameters = parameters_of_units(units)
    place = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
    wanted, trains = [], [any(p.requires_grad for p in parameters[unit]) for unit in units]
    first = trains.index(True)  # no gradient reaches units before it
    for unit in [*units, *(unit for unit in reversed(units[first:]) if reads_weights_in_backward(unit))]:
        own = dict.fromkeys(place[p] for p in parameters[unit] if p in place)
        wanted += [bucket for bucket in own
                   if not all(slot.parameter.numel() < persistence_threshold for slot in bucket.slots)]
    freed = large_heads(model, buckets)
    return [bucket for i, bucket in enumerate(wanted) if not i or bucket is not wanted[i - 1] or bucket in freed]


def _check_stage(stage):
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: expected 0 (DataParallel), 1, 2 or 3")
