"""Exercise of the page *Who waits in a ring*."""

import torch

from refimpl.model import softmax_attention

from . import exercise, launch

B, H, T, D = 2, 8, 32, 4


def _exchanged(comm, ulysses):
    """Return (output of this rank's tokens, shapes that attention was given, bytes sent)."""
    generator, seen = torch.Generator().manual_seed(0), []
    q, k, v = (x.chunk(comm.world_size, 2)[comm.rank].contiguous()
               for x in torch.randn(3, B, H, T, D, generator=generator))

    def attention(q, k, v):
        seen.append([tuple(x.shape) for x in (q, k, v)])
        return softmax_attention(q, k, v, causal=True)

    return ulysses(comm, q, k, v, attention), seen, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def first(ulysses):
    """Grade `ulysses(comm, q, k, v, attention)`: attention of a rank's tokens; ranks exchange tokens for heads
    and back."""
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(0))
    whole = softmax_attention(q, k, v, causal=True)
    for N in (1, 2, 4):
        for rank, (out, seen, sent) in enumerate(launch(_exchanged, N, ulysses, device="cpu")):
            where, right = f"rank {rank} of {N}", whole.chunk(N, 2)[rank]
            if not isinstance(out, torch.Tensor) or out.shape != right.shape:
                return f"{where}: the output is {getattr(out, 'shape', out)!r}, expected {tuple(right.shape)}"
            if seen != [[(B, H // N, T, D)] * 3]:
                return f"{where}: attention was given {seen}, expected once three of {(B, H // N, T, D)}"
            if not torch.allclose(out, right, atol=1e-5):
                return f"{where}: the output is not that of the whole sequence"
            most = 4 * right.nbytes * (N - 1) // N
            if sent > most:
                return f"{where}: the output is right, but {sent:,} bytes were sent; {most:,} are enough"
    return None
