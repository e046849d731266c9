"""Quantised collectives in closed form: bytes on the wire, exactly, and bytes in flight.

With N ranks, n = Ψ/N numbers of a bucket's shard, and P(n) bytes of the payload of n numbers (`codec`):

    collective                       a rank sends                         in flight, besides the result
    gather (stage 3)                 (N−1) · P(n)                         N · P(n)
    reduce to shards                 (N−1) · P(n)                         2N · P(n)
    … on two levels, N = S · R       (S−1)R · P(n) + (R−1) · P(n)         2N · P(n)
    mean on all of R ranks           2(R−1) · P(⌈n/R⌉)                    2R · P(⌈n/R⌉)

P(n) is (1 + 4/b) · n bytes with 8 bits, (1/2 + 4/b) · n with 4. "ZeRO++" (Wang et al. 2023), table 1, counts M numbers
for each collective in fp16: 3M a step, and 0.5M + 0.25M between machines with both and hpZ, which is not here: `shards`
and `replicas` keep the gathers in a machine.
"""

from ...comm.traffic import Traffic, ring_traffic
from ..bucket import buckets_of, default_bucket_bytes
from ..closed_forms import gathers, step_traffic
from ..units import default_units, frozen_buckets, unit_buckets
from .reduce import part_numel


def gather_bytes(codec, numel, world_size):
    """Return the bytes of the payloads of one gather of shards of `numel`; (N−1)/N of them are sent."""
    return world_size * codec.payload_bytes(numel) if world_size > 1 else 0


def reduce_bytes(codec, numel, world_size, ranks_per_machine=None):
    """Return {"in flight", "decoded": bytes} of a reduction to shards of `numel`: the payloads sent and received; then
    those received, the mean in fp32, and on two levels what goes on to other machines. A slice of 2¹⁶ numbers or two,
    in fp32, come on top where torch decodes."""
    payloads, levels = gather_bytes(codec, numel, world_size), ranks_per_machine not in (None, 1, world_size)
    further = payloads // ranks_per_machine if levels else 0
    return {"in flight": 2 * payloads, "decoded": payloads + 4 * numel + further}


def reduce_traffic(codec, numel, world_size, ranks_per_machine=None):
    """Return {"intra", "inter": bytes} that a rank sends in a reduction to shards of `numel`; on one level all of it is
    "intra"."""
    N, S = world_size, ranks_per_machine or world_size
    S = N if S in (1, N) else S
    R, p = N // S, codec.payload_bytes(numel)
    return {"intra": ring_traffic("all_to_all", N * p, S), "inter": ring_traffic("all_to_all", R * p, R)}


def mean_traffic(codec, numel, world_size):
    """Return the Traffic of a rank in a mean of `numel` on all ranks: between replicas, or of data parallelism."""
    payloads = world_size * codec.payload_bytes(part_numel(numel, world_size))
    return Traffic({kind: ring_traffic(kind, payloads, world_size) for kind in ("all_to_all", "all_gather")})


def quantized_traffic(model, world_size, stage, *, weights=None, gradients=None, ranks_per_machine=None,
                      micro_batches=1, units=None, bucket_bytes=None, persistence_threshold=0, **options):
    """Return the Traffic of a rank in one step of stage 1, 2 or 3: `step_traffic`, with the collectives that codecs
    replace. `weights`: the codec of `quantized_weights`, at stage 3; `gradients`, `ranks_per_machine`: those of
    `QuantizedReduce`; the other arguments as of `step_traffic`."""
    N, plain = world_size, {"units": units, "persistence_threshold": persistence_threshold}
    sent = step_traffic(model, N, stage, micro_batches=micro_batches, bucket_bytes=bucket_bytes, **plain, **options)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    units = default_units(model) if units is None else units
    size = default_bucket_bytes(named, stage) if bucket_bytes is None else bucket_bytes
    trained = unit_buckets(named, units, N, persistence_threshold) if stage == 3 else buckets_of(named, N, size)
    if gradients is not None and N > 1:
        reduced = sum(sum(reduce_traffic(gradients, bucket.shard_numel, N, ranks_per_machine).values())
                      for bucket in trained)
        sent = sent - Traffic(reduce_scatter=sent["reduce_scatter"]) + Traffic(
            all_to_all=reduced * (micro_batches if stage >= 2 else 1))
    if weights is not None and stage == 3 and N > 1:
        buckets = [*trained, *frozen_buckets(model, units, N, persistence_threshold)]
        for bucket in gathers(model, buckets, units, persistence_threshold):
            payloads = gather_bytes(weights, bucket.shard_numel, N)
            saved = ring_traffic("all_gather", bucket.nbytes, N) - ring_traffic("all_gather", payloads, N)
            sent = sent - Traffic(all_gather=micro_batches * saved)
    return sent
