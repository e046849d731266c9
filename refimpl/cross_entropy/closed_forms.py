"""Bytes of a head and its loss, with logits and without."""

from typing import NamedTuple

import torch

from ..comm.traffic import Traffic, ring_traffic
from .chunked import default_chunk_size


class HeadBytes(NamedTuple):
    """Bytes above what was there: hidden, weight, bias and targets. What is kept between forward and backward, and the
    peaks of forward and of backward, both with what is kept."""

    saved: int
    forward: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


def plain_cross_entropy_bytes(N: int, V: int, C: int, dtype: torch.dtype = torch.float32) -> HeadBytes:
    """Return HeadBytes of `F.cross_entropy((hidden @ weight.T).float(), targets).backward()`: N rows, V · C weights.

        saved       N·V·w + 2w                        log-softmax, w bytes each: 8 of fp64, else 4; the loss, the count
        forward     2N·V·w + 2w                       the logits in fp32, too
        backward    2w + max(3N·V·w,                  also the gradients of log-softmax and of logits, later
                             N·V·d + V·C·d + N·C·d)   that of the logits in `dtype`, d bytes each, dW and dh
    """
    d, w = dtype.itemsize, _wide(dtype).itemsize
    saved = N * V * w + 2 * w
    return HeadBytes(saved, N * V * w + saved, 2 * w + max(3 * N * V * w, (N * V + V * C + N * C) * d))


def chunked_cross_entropy_bytes(N: int, V: int, C: int, dtype: torch.dtype = torch.float32, *,
                                weight_dtype: torch.dtype | None = None, weight_gradient: torch.dtype | None = None,
                                chunk_size: int | None = None, bias: bool = False, label_smoothing: float = 0.0,
                                softcap: float | None = None, parts: int = 1, split: bool = False,
                                hidden_needs: bool = True, weight_needs: bool = True,
                                device: torch.device | str = "cpu") -> HeadBytes:
    """Return HeadBytes of `chunked_linear_cross_entropy` and its backward, for N rows, all targets in int64.

        saved       K·N·C·d + V·C·s + V·w + 2w            dh; sums of dW, s bytes each, and of db; the loss, a factor
        forward     saved − w + 2Kw + chunk
        chunk       R·V·(w + d′) + max(rows, product)     R = chunk_size; d′ = d of 16-bit dtypes, else 0
        rows        R·V·w if softcap + R·(9 + (7 + s)·w)  s = 1 with label_smoothing, + 1 and a byte more with `split`
        product     R·w + max(V·w, R·C·w)                 db of the chunk; the chunk in fp32, for 16 bits on a CPU
        backward    saved + w + R·C·w                     16 bits: rows of dh are scaled in fp32, and of dW, R at most

    s: w, or the bytes of `weight_gradient`. The fp32 sum of a 16-bit weight has half its rows in dW's own memory (see
    `weight_gradient`), V/2 rounded down: C·d bytes more for an odd V.
    d, w: bytes of `dtype` and of fp32 (8 for fp64). Without gradients of hidden, weight or bias their terms are absent.
    `parts` K: losses of one head, each of N rows. `split`: V is this rank's part. `weight_dtype`: the weight's own, if
    autocast casts it, V·C·d more in forward, and its gradient stays in fp32: in backward its rows are scaled in place.
    No term has N·V.
    """
    wide = _wide(dtype)
    d, w, half = dtype.itemsize, wide.itemsize, dtype.itemsize == 2
    R = chunk_size and min(chunk_size, N) or default_chunk_size(N, V, C)
    any_needed = hidden_needs or weight_needs
    dh = parts * N * C * d * hidden_needs
    bias = bias and weight_needs
    narrow = half and weight_needs and weight_dtype in (None, dtype)
    own = narrow and weight_gradient == dtype
    beside = (V - V // 2) * C * w if narrow and not own else 0  # the half of an fp32 sum that has no room in dW
    total = V * C * d + beside if narrow else V * C * w * weight_needs
    saved = dh + total + bias * V * w + 2 * w
    vectors = 2 + bool(label_smoothing) + split
    rows = R * (9 + split + (4 + any_needed + vectors) * w) + R * V * w * (softcap is not None) * any_needed
    product = R * w + max(V * w * bias, R * C * w * (half and weight_needs and not own and device == "cpu"))
    cast = V * C * d * (weight_dtype not in (None, dtype))
    forward = saved - w + 2 * parts * w + R * V * (w + d * half) + max(rows, product) + cast
    rounded = max(min(R, V - V // 2 * (not own)) * C * w, V * d * bias - beside) * narrow
    backward = saved + w + max(R * C * w * (half and hidden_needs), rounded)
    return HeadBytes(saved, forward, backward)


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def split_cross_entropy_traffic(N: int, C: int, rank: int, world_size: int, dtype: torch.dtype = torch.float32, *,
                                chunk_size: int, label_smoothing: float = 0.0, hidden_needs: bool = True) -> Traffic:
    """Return the Traffic (bytes) of `rank` for a head split over `world_size` ranks, forward and backward.

    Each chunk of R rows has an all_reduce of R maxima and one of 3R sums (4R with label_smoothing), in fp32 or fp64;
    then one of dh, N·C numbers of `dtype`: at the end of forward. `fused_linear_cross_entropy` has all rows in one
    chunk, and that of dh in backward.
    """
    w, sums = _wide(dtype).itemsize, 4 if label_smoothing else 3
    chunks = [min(chunk_size, N - first) for first in range(0, N, chunk_size)]
    sizes = [(R * k, w) for R in chunks for k in (1, sums)] + [(N * C, dtype.itemsize)] * hidden_needs
    return Traffic(all_reduce=sum(ring_traffic("all_reduce", count * each, world_size, rank, each)
                                  for count, each in sizes))
