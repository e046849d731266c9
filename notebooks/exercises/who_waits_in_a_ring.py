"""Exercise of the page *Who waits in a ring*."""

import torch

from refimpl.model import softmax_attention

from . import Complaint, close, exercise, launch, readable

HINTS = {
    "first": [
        "Exchange q, k and v before attention, and the output after it. Before attention a rank sends its tokens of "
        "all heads, and receives all tokens of H/N heads. After attention it is the other way round.",
        "`x.unflatten(1, (N, H // N)).movedim(1, 0).contiguous()` has a part for each rank. What arrives is "
        "(N, B, H/N, T/N, D). `movedim(0, 2).flatten(2, 3)` makes whole sequences of it.",
        "On the way back cut the tokens: `out.unflatten(2, (N, -1)).movedim(2, 0).contiguous()`. What arrives is again "
        "(N, B, H/N, T/N, D). Now its first dimension is that of the heads: `movedim(0, 1).flatten(1, 2)`."]}

B, T, D = 2, 60, 5


def _whole(heads):
    """Return q, k and v of all tokens. Their scores are large: each key counts."""
    return 2 * torch.randn(3, B, heads, T, D, generator=torch.Generator().manual_seed(heads))


def _exchanged(comm, ulysses, heads):
    """Return (output of this rank's tokens, shapes that attention was given, bytes sent)."""
    seen = []

    def attention(q, k, v):
        seen.append([tuple(x.shape) for x in (q, k, v)])
        return softmax_attention(q, k, v, causal=True)

    out = ulysses(comm, *(x.chunk(comm.world_size, 2)[comm.rank].clone() for x in _whole(heads)), attention)
    if not readable(out):
        raise Complaint("the storage of the output was freed")
    return out, seen, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def first(ulysses):
    """Grade `ulysses(comm, q, k, v, attention)`: attention of a rank's tokens; ranks exchange tokens for heads and
    back. `attention` has to get whole sequences of H/N heads on each rank, in one call or in several."""
    for N, H in ((1, 4), (2, 6), (3, 3)):
        whole = softmax_attention(*_whole(H), causal=True)
        for rank, (out, seen, sent) in enumerate(launch(_exchanged, N, ulysses, H, device="cpu")):
            where, right = f"rank {rank} of {N}", whole.chunk(N, 2)[rank]
            heads = [sum(shape[1] for shape in shapes) for shapes in zip(*seen, strict=True)]
            if heads != [H // N] * 3 or {shape[:1] + shape[2:] for shapes in seen for shape in shapes} != {(B, T, D)}:
                return (f"{where}: attention was given {seen or 'nothing'}, expected q, k and v of "
                        f"{(B, H // N, T, D)}: all {T} tokens of {H // N} of the {H} heads")
            if out.shape != right.shape or out.dtype != right.dtype:
                return (f"{where}: the output is {tuple(out.shape)} in {out.dtype}, expected {tuple(right.shape)} in "
                        f"{right.dtype}: all heads of this rank's tokens")
            if not close(out, right):
                order = ": its heads are in another order" if close(out.sum(1), right.sum(1)) else ""
                return f"{where}: the output is not that of the whole sequence{order}"
            enough = 4 * right.nbytes * (N - 1) // N
            if sent != enough:
                return (f"{where}: the output is right, but {sent:,} bytes were sent by `comm`; (N-1)/N of q, k, v and "
                        f"the output are {enough:,}")
    return None
