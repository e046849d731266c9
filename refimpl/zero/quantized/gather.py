"""qwZ: a unit's parameters are gathered as blocks of int8, and are whole only once they are decoded.

    rank r    shard of n numbers → payload of P(n) bytes        encoded where it lands: one buffer, N · P(n)
    wire      (N−1) · P(n) from each rank                       in place of (N−1) · 4n, or 2n in bf16
    rank r    N payloads → N·n numbers, in the parameters' dtype

While it is in flight a unit takes the N · P(n) bytes of its payloads, and not the 4·N·n of its parameters: a prefetched
unit is a quarter as large. All ranks decode the same payloads, this rank's own too, so all compute with the same
numbers. The shard itself is not changed: the optimizer adds its updates to exact numbers. "ZeRO++" (Wang et al. 2023),
section 3.1. Tensors lie side by side in a bucket, and a block may have the end of one and the beginning of the next:
`persistence_threshold` keeps small ones, such as norms, apart and exact.
"""

import torch

from ...comm.agreement import check_same
from ...comm.handle import Then
from ...common.marks import mark
from .codec import BlockCodec


class QuantizedGather:
    """Gathers shards over `comm` by a BlockCodec."""

    def __init__(self, comm, codec):
        self.comm, self.codec = comm, codec

    @torch.no_grad()
    def launch(self, shard, whole, label=""):
        """Encode shard (n,) and launch the all_gather of payloads. The handle's `wait()` decodes them to whole (N·n,),
        whose storage needs bytes only from then on."""
        N, n = self.comm.world_size, shard.numel()
        payloads = torch.empty(N, self.codec.payload_bytes(n), dtype=torch.uint8, device=shard.device)
        mark(payloads, "communication")
        mine = payloads[self.comm.rank]
        self.codec.encode(shard[None], mine[None])  # where it lands: this rank's own payload is not copied
        handle = self.comm.all_gather(mine, out=payloads.view(-1), async_op=True, label=label)

        @torch.no_grad()
        def decode(gathered):
            self.codec.decode(gathered.view(N, 1, -1) if n else gathered, whole.view(N, n))
            return whole

        return Then(handle, decode)


def quantized_gather(comm, codec):
    """Return what gathers over the ranks that cut the parameters; None if `codec` is None, or for one rank. TypeError
    for what is no BlockCodec."""
    if codec is not None and not isinstance(codec, BlockCodec):
        raise TypeError(f"quantized_weights={codec!r}: expected BlockCodec() of refimpl.zero.quantized, or None")
    return None if codec is None or comm.world_size == 1 else QuantizedGather(comm, codec)


def check_codec(comm, codec):
    """Raise CollectiveMismatch, naming the ranks, if some rank gathers by another codec. All ranks call it."""
    check_same(comm, "quantized_weights", repr(codec))
