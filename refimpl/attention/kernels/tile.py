"""What the Triton kernels share: where a tile is in memory, which keys its queries see, which weights are dropped.

Shapes within a kernel: M rows (queries) and N keys of a tile, D columns, padded with zeros to a power of two. A
tensor's pointer and its four strides are one NamedTuple, an argument that Triton takes apart by itself; a None in one
is a constant of the compiled kernel, so that `if left is not None` costs nothing at run time.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..call.sequences import Band
from .configs import Config

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x · log2 e), and 2^x is one instruction of the GPU


class Heads(NamedTuple):
    """A tensor (batch, heads, sequence, column) as a kernel takes it: a pointer, and strides in elements."""

    ptr: torch.Tensor
    batch: int
    head: int
    row: int
    column: int

    @classmethod
    def of(cls, x):
        """Describe a tensor of four dimensions, or of three: (batch, heads, sequence)."""
        return cls(x, *x.stride(), *[1] * (4 - x.ndim))


class Packed(NamedTuple):
    """Where the sequences of a packed batch begin, for queries and for keys: two int32 tensors."""

    queries: torch.Tensor
    keys: torch.Tensor


class Dropout(NamedTuple):
    """A weight is dropped if its random word is below `threshold`; the others are multiplied by `scale`."""

    seed: torch.Tensor
    threshold: int
    scale: float  # 1 / (1 − p)


class Score(NamedTuple):
    """The hooks of a call, each None if it has none. (Triton 3.6 cannot ask whether a tuple with a None in it is
    None.)"""

    any: int | None = None  # 1 if there is a hook
    softcap: float | None = None
    slopes: torch.Tensor | None = None  # (H,)
    documents: torch.Tensor | None = None  # (B, S) ints
    keys: int | None = None  # S of `documents`
    prefix: torch.Tensor | None = None  # (sequences,) ints

    @classmethod
    def of(cls, softcap, slopes, documents, prefix):
        """Make a Score of an operator's arguments."""
        some = any(x is not None for x in (softcap, slopes, documents, prefix)) or None
        return cls(some and 1, softcap, slopes, documents, None if documents is None else documents.shape[1], prefix)


class Problem(NamedTuple):
    """What the kernels are to compute, besides the tensors."""

    scale: float
    band: Band  # of the longest sequences, if packed
    packed: Packed | None
    count: int  # of sequences: the batch, if not packed
    dropout: Dropout | None
    score: Score = Score()
    sinks: torch.Tensor | None = None  # (H,)

    @classmethod
    def of(cls, q_BHTD, k_BGSD, scale, causal, window, dropout_p, seed, cu_seqlens, cu_seqlens_k, longest, longest_k,
           score=None, sinks=None):
        """Make a Problem from the arguments of an attention; `cu_seqlens` are int32 tensors, or None: then `longest` is
        not read."""
        dropout = None if seed is None else Dropout(seed, int(dropout_p * 2**32), 1 / (1 - dropout_p))
        if cu_seqlens is None:
            band, packed, count = Band.of(q_BHTD.shape[2], k_BGSD.shape[2], causal, window), None, q_BHTD.shape[0]
        else:
            # the grid is as for the longest sequence; others return early
            packed, count = Packed(cu_seqlens, cu_seqlens_k), len(cu_seqlens) - 1
            band = Band.of(longest, longest_k, causal, window)
        if window is not None:  # a window far larger than the sequence would overflow 32 bits
            most = max(band.T, band.S)
            band = band._replace(left=min(band.left, most), right=min(band.right, most))
        return cls(scale, band, packed, count, dropout, Score() if score is None else score, sinks)

    def arguments(self, q_BHTD, v_BGSV):
        """Return what every kernel is launched with besides its tensors and its tile."""
        (_, H, _, D), (G, V) = q_BHTD.shape, (v_BGSV.shape[1], v_BGSV.shape[3])
        return {"packed": self.packed, "band": self.band, "heads": H, "group": H // G, "scale": self.scale,
                "dropout": self.dropout, "score": self.score, "D": D, "BLOCK_D": padded(D), "V": V,
                "BLOCK_V": padded(V)}


class Launch(NamedTuple):
    """A kernel with everything that it is launched with, or compiled with for a GPU that is not there."""

    kernel: object
    programs: int
    arguments: dict
    config: Config

    def run(self, device):
        """Launch on `device`: Triton itself launches on the current one."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[(self.programs,)](**self.arguments, num_warps=self.config.num_warps,
                                          num_stages=self.config.num_stages)


def padded(D):
    """Round head_dim up to what tl.dot takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(D))


@triton.jit
def place(length, BLOCK: tl.constexpr, heads):
    """Return (tile, head, sequence) of this program: tiles of one head are neighbours, the last one first."""
    tiles = tl.cdiv(length, BLOCK)
    rest = tl.program_id(0) // tiles
    return tiles - 1 - tl.program_id(0) % tiles, rest % heads, rest // heads


@triton.jit
def sequence(packed, band, index):
    """Return (batch, first row, T, first key, S) of sequence `index`: one of a batch, or a part of a packed one."""
    if packed is None:
        return index, 0, band.T, 0, band.S
    else:
        row, key = tl.load(packed.queries + index), tl.load(packed.keys + index)
        return 0, row, tl.load(packed.queries + index + 1) - row, key, tl.load(packed.keys + index + 1) - key


@triton.jit
def start(x, batch, head, row):
    """Return a pointer to a row of a head. In 64 bits: a tensor may have more than 2³¹ elements."""
    batch, head, row = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), tl.cast(row, tl.int64)
    return x.ptr + batch * x.batch + head * x.head + row * x.row


@triton.jit
def pointers(x, ptr, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (ROWS, COLUMNS) pointers from row `first` after `ptr`. Within a tile 32 bits suffice
    (`operators.MAX_STRIDE`) and save registers."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return ptr + tl.cast(first, tl.int64) * x.row + row * x.row + column * x.column


@triton.jit
def load(x, ptr, first, end, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile of rows `first` to first + ROWS; zeros from row `end` and from column D on."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = row < end if D == COLUMNS else (row < end) & (column < D)
    return tl.load(pointers(x, ptr, first, ROWS, COLUMNS), mask=mask, other=0.0)


@triton.jit
def store(x, ptr, first, end, tile, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the rows of `tile` before `end`, and its first D columns."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = pointers(x, ptr, first, ROWS, COLUMNS)
    tl.store(at, tile.to(x.ptr.dtype.element_ty), mask=(row < end) & (column < D))


@triton.jit
def sees(row, key, T, S, band):
    """Return True where a query sees a key, for two tensors of positions that broadcast: a `Band` in one
    expression."""
    position = row + (S - T)
    seen = key < S
    if band.left is not None:
        seen = seen & (key >= position - band.left)
    if band.right is not None:
        seen = seen & (key <= position + band.right)
    return seen


@triton.jit
def fully_masked(T, S, band):
    """Count the queries that see no key, the first ones: `Band.fully_masked`."""
    none = 0
    if band.right is not None:
        none = tl.minimum(tl.maximum(T - S - band.right, 0), T)
    return tl.where(S == 0, T, none)


@triton.jit
def key_range(first, end, T, S, band, BLOCK: tl.constexpr):
    """Return (first, end) of the keys that any of the queries first … end − 1 sees; first is a multiple of BLOCK."""
    shift = S - T
    begin, stop = 0, S
    if band.left is not None:
        begin = tl.maximum(first + shift - band.left, 0) // BLOCK * BLOCK
    if band.right is not None:
        stop = tl.minimum(end + shift + band.right, S)
    return begin, stop


@triton.jit
def row_range(first, end, T, S, band):
    """Return (first, end) of the queries that see any of the keys first … end − 1; fully masked ones come before."""
    shift = S - T
    begin, stop = 0, T
    if band.right is not None:
        begin = tl.maximum(first - shift - band.right, 0)
    if band.left is not None:
        stop = tl.minimum(end - shift + band.left, T)
    return begin, stop


@triton.jit
def dropout_scale(dropout):
    """Return what weights that are not dropped are multiplied by."""
    if dropout is None:
        return 1.0
    else:
        return dropout.scale


@triton.jit
def dropped(dropout, head, row, key, packed, M: tl.constexpr, N: tl.constexpr):
    """Return (M, N) booleans, True where a weight is dropped: `philox.dropped` for the tile that begins at (row, key).
    `head` counts over the batch.

    One run of Philox gives the words of four neighbours. A packed sequence may begin anywhere, so that four neighbours
    of a tile may belong to two runs: then each weight takes a run of its own.
    """
    seed, rows = tl.load(dropout.seed), (row + tl.arange(0, M))[:, None]
    if packed is None:
        runs = (key // 4 + tl.arange(0, N // 4))[None, :]  # tiles begin at multiples of 4: runs are whole
        c0, c1 = tl.broadcast(runs, rows)
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c0 * 0 + head, c0 * 0)
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(M, N)
    else:
        keys = (key + tl.arange(0, N))[None, :]
        c0, c1 = tl.broadcast(keys // 4, rows)
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c0 * 0 + head, c0 * 0)
        which = keys % 4
        word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return word.to(tl.int64) < dropout.threshold
