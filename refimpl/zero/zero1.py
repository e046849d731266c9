"""ZeRO stage 1: each rank keeps the optimizer's state of 1/N of the parameters, and updates those alone.

Data parallelism makes every rank compute the same update of every parameter, from N equal copies of Adam's two moments
(and of the fp32 masters, if parameters are 16-bit). Here a rank updates its shard of each bucket, and gathers the rest:

    reduce_scatter of gradients     (N−1)/N · Ψ        a rank needs the average of its own shard alone
    all_gather of parameters        (N−1)/N · Ψ        every rank needs all parameters for the next forward

which together is what an all_reduce sends: 2Ψ, as before. Bytes with Adam in fp32: 4Ψ + 4Ψ + 8Ψ/N. "ZeRO" (Rajbhandari
et al. 2020), sections 5.1 and 7. `update` has the optimizer on shards, `WholeParameters.updated` the all_gather.
"""

from .engine import Engine
from .reducer import ReduceScatter
from .update import ShardedUpdate


class Zero1(Engine):
    """`DataParallel` with the optimizer's state in shards: same arguments, same numbers, 2Ψ on the wire.

    Parameters of 16 bits have an fp32 master, in shards too. The optimizer has to treat each element by itself, as
    Adam and SGD do; TypeError for one that does not. `no_sync` as before: gradients are whole until they are reduced,
    in the last micro-batch.
    `store`: a `ShardStore` that keeps shards while nothing computes with them; by default they remain on the device.
    `update`: what makes the optimizer on shards, by default `ShardedUpdate`, with a store `StoredUpdate`. On the host:
    `functools.partial(ShardedUpdate, device="cpu")`.
    `shards`, `replicas`: two levels of `comm`, as a mesh connects them. States are cut among the ranks of `shards`
    alone, and `replicas` are the ranks that hold the same (`hybrid`). By default all ranks of `comm` cut them.
    """

    stage, reducer_type, update_type = 1, ReduceScatter, ShardedUpdate
