"""Attention over the blocks of a mask: the tiles of `tiled`, for those blocks alone that are listed.

    for each block of queries:  for each listed block of keys:  the online softmax of `tiled`; in backward dQ, dK, dV

A full block is computed as a dense one; of a partial block the pairs that are not seen become −∞. So FLOPs and bytes
follow the blocks that are listed, `mask.tile_density` of what a dense attention takes. What is not listed costs
nothing: it is not computed and then masked.
"""

import collections.abc
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.derivatives import refuse_transforms
from ..common.nested_tensors import is_dry
from .call.arguments import INSTEAD, check_scale, check_tensors
from .call.sequence_tiles import SequenceTiles
from .call.sequences import Band, Sequence, tiles
from .flash import KERNEL_DTYPES, check_for_kernels, kernels_run_on
from .kernels.sparse_operators import sparse_attention_forward
from .masks import BlockMask, check_block, unpacked
from .reference import AttentionBytes, AttentionFlops, resolve_shapes
from .scores import as_kernels_take, hook_of
from .tiled import Tiled

if TYPE_CHECKING:
    from .scores import ScoreHook

Shape = collections.abc.Sequence[int]
FORMS = ("auto", "triton", "tiled")
AT_ONCE = 1024  # keys that pass a block of queries together: fewer and larger products than block by block


def block_sparse_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor,
                           mask: "BlockMask | torch.Tensor", *, scale: float | None = None,
                           score: "ScoreHook | None" = None, return_logsumexp: bool = False,
                           kernel: str = "auto") -> Any:
    """Compute softmax(scale · q kᵀ) v over the pairs that `mask` has, block by block: what it does not list is neither
    loaded nor computed, forward or backward. Returns (B, H, T, V) in q's dtype.

    - `mask`: a BlockMask (see `masks`), or an `attn_mask` as scaled_dot_product_attention takes it: booleans, True
      where a query sees a key, or numbers to add, 0 and −∞, of a shape that broadcasts to (B, H, T, S). A tensor is cut
      into blocks once, and again when it has been written to.
    - `score`: hooks as in `flash_attention` (`scores.py`). G divides H, as there.
    - `scale`: default 1/√D. `return_logsumexp`: (out, lse_BHT), natural, in fp32 or wider.
    - `kernel`: "triton", "tiled" (the same in PyTorch), or "auto": Triton where `flash_attention`'s kernels run.

    A query that sees no key gives zeros (lse −∞) and zero gradients. Raises TypeError or ValueError for arguments that
    do not fit: a mask of another length, batch or number of heads, an attn_mask with other numbers (give them as a
    hook), "triton" where it does not run; and as `tiled_attention` does where the backward would be differentiated.
    """
    refuse_transforms("block_sparse_attention", INSTEAD, (q_BHTD, k_BGSD, v_BGSV))
    check_tensors(q_BHTD, k_BGSD, v_BGSV)
    mask = mask_of(mask, q_BHTD, k_BGSD)
    score = hook_of(score)
    if score is not None:
        score.check(q_BHTD, k_BGSD, False, None)
    scale = check_scale(q_BHTD.shape[-1] ** -0.5 if scale is None else scale)
    if kernel not in FORMS:
        raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(map(repr, FORMS))}")
    hooks = as_kernels_take(score)  # without one four Nones; None: one that kernels do not know
    runs = hooks is not None and kernels_run_on(q_BHTD.device) and q_BHTD.dtype in KERNEL_DTYPES
    if kernel == "triton" and not runs:
        raise ValueError(f"kernel='triton' for {q_BHTD.dtype} on {q_BHTD.device} with score={score}: the kernels run "
                         "where flash_attention's do; kernel='tiled' computes the same in PyTorch")
    if kernel == "tiled" or not runs:
        call = BlockSparseCall(scale, score, mask)
        out_BHTV, lse_BHT = Tiled.apply(q_BHTD, k_BGSD, v_BGSV, None, None, call, (mask.block, AT_ONCE))
        return (out_BHTV, lse_BHT) if return_logsumexp else out_BHTV
    check_for_kernels(q_BHTD, k_BGSD, v_BGSV)
    there = mask.to(q_BHTD.device)
    lists = there.by_query.whole, there.by_key.whole, there.words
    if is_dry(q_BHTD):
        lists = [q_BHTD.new_empty(x.shape, dtype=x.dtype) for x in lists]
    out_BHTV, lse2_BHT = sparse_attention_forward(
        q_BHTD, k_BGSD, v_BGSV, *lists, mask.block, *mask.shape[:2], scale,
        *(x.contiguous() if isinstance(x, torch.Tensor) else x for x in hooks))
    return (out_BHTV, lse2_BHT * math.log(2)) if return_logsumexp else out_BHTV  # from base 2, in which kernels count


# --- an attn_mask ----------------------------------------------------------------------------------------------------

_cut = WeakTensorKeyDictionary()  # attn_mask → ((its version, T, S), its BlockMask)


def mask_of(mask, q_BHTD, k_BGSD):
    """Return `mask` as a BlockMask that fits q and k. Raises TypeError or ValueError."""
    (B, H, T, _), S = q_BHTD.shape, k_BGSD.shape[2]
    if isinstance(mask, torch.Tensor):
        key = None if mask.is_inference() else mask._version, T, S  # one of inference mode has no version
        if mask not in _cut or _cut[mask][0] != key or mask.is_inference():
            _cut[mask] = key, cut(mask, T, S)
        mask = _cut[mask][1]
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask is a {type(mask).__name__}: expected a BlockMask, such as longformer_mask(seq_len, …), "
                        "or a tensor of booleans")
    if mask.shape[2:] != (T, S):
        raise ValueError(f"a mask of {mask.T} queries and {mask.S} keys with {T} and {S}: expected a mask of these "
                         "lengths")
    for name, own, size in zip(("batch", "heads"), mask.shape, (B, H), strict=False):
        if own not in (1, size):
            raise ValueError(f"a mask of {own} in {name} with {size}: expected 1 or {size}")
    return mask


def cut(attn_mask: torch.Tensor, T: int, S: int, block: int = 128) -> BlockMask:
    """Cut an `attn_mask`, booleans or numbers to add that broadcast to (batch, heads, T, S), into blocks.

    Raises ValueError for another shape, or for numbers besides 0 and −∞ (or the least of its dtype).
    """
    check_block(block)
    seen = attn_mask.detach().cpu()
    if seen.ndim not in (2, 3, 4) or any(own not in (1, size) for own, size in zip(seen.shape[-2:], (T, S),
                                                                                 strict=True)):
        raise ValueError(f"an attn_mask of shape {tuple(seen.shape)} with {T} queries and {S} keys: expected (T, S), "
                         "or a shape that broadcasts to (batch, heads, T, S)")
    if seen.dtype != torch.bool:
        hidden = seen <= (torch.finfo(seen.dtype).min if seen.is_floating_point() else -math.inf)
        if not (hidden | (seen == 0)).all():
            raise ValueError(f"an attn_mask of {seen.dtype} with numbers besides 0 and −∞: expected booleans, True "
                             "where a query sees a key, or 0 and −∞; other numbers are a hook's to add (score=)")
        seen = ~hidden
    seen = seen.view(*[1] * (4 - seen.ndim), *seen.shape)
    seen = seen.expand(*seen.shape[:2], T, S)
    return BlockMask.of(lambda b, h, i, j: seen[b, h, i - (S - T), j], T, S, batch=len(seen), heads=seen.shape[1],
                        block=block)


# --- tiles -----------------------------------------------------------------------------------------------------------


class BlockSparseCall(NamedTuple):
    """An attention call over the blocks of a mask, as `tiled` takes an AttentionCall."""

    scale: float
    score: object
    mask: BlockMask
    dropout_p: float = 0.0
    seed: None = None
    may_hide = True

    @property
    def sequences(self):
        """Return what tells calls apart whose tiles differ."""
        return self.mask

    def with_seed(self, seed):
        """Return the call: it has no seed."""
        return self

    def parts(self, q_BHTD, k_BGSD):
        """List what has a list of its own: all, or each sequence, or each head of each."""
        (B, H), G, (batch, heads) = q_BHTD.shape[:2], k_BGSD.shape[1], self.mask.shape[:2]
        return [BlockTiles(self, b * heads + h, (0, B) if batch == 1 else (b, b + 1),
                           (0, H) if heads == 1 else (h, h + 1),
                           (0, G) if heads == 1 else (h * G // H, h * G // H + 1), q_BHTD)
                for b in range(batch) for h in range(heads)]


class BlockTiles(NamedTuple):
    """The blocks of one list, number `index`, and the sequences and heads that share it: as `SequenceTiles`."""

    call: BlockSparseCall
    index: int
    batch: tuple
    query_heads: tuple
    key_heads: tuple
    like: torch.Tensor  # q: its device, and whether the run is dry

    @property
    def sequence(self):
        """Return where the part lies: all of each sequence."""
        T, S = self.call.mask.shape[2:]
        return Sequence((0, T), (0, S), Band(T, S))

    @property
    def heads(self):
        """Return (B, H, G) of this part."""
        return tuple(end - first for first, end in (self.batch, self.query_heads, self.key_heads))

    def cut(self, by_query, by_key):
        """Return views of the part's own heads of tensors (B, H, T, …) and (B, G, S, …)."""
        batch, queries, keys = (slice(*each) for each in (self.batch, self.query_heads, self.key_heads))
        return [x[batch, queries] for x in by_query] + [x[batch, keys] for x in by_key]

    def tiles(self, sizes, is_new):
        """Yield (rows, [spans of keys, …]): AT_ONCE keys at a time, neighbouring blocks as one span."""
        mask = self.call.mask
        n, at_once = mask.block, sizes[1] // mask.block
        for row, rows in enumerate(tiles((0, mask.T), n)):
            listed = list(self._listed(row))
            chunks = [_spans(listed[first : first + at_once], n, mask.S) for first in range(0, len(listed), at_once)]
            found = [spans for spans in chunks if is_new((
                rows[1] - rows[0], tuple(end - first for first, end in spans), len(self._partial(rows, spans)) > 0))]
            if found or not listed and is_new(rows[1] - rows[0]):
                yield rows, found

    def _listed(self, row):
        return self.call.mask.listed[self.index * self.call.mask.grid[0] + row]

    def _partial(self, rows, spans):
        """Return {first column of it in the tile: its pattern} of the partial blocks among some keys."""
        n, listed, column, found = self.call.mask.block, self._listed(rows[0] // self.call.mask.block), 0, {}
        for first, end in spans:
            for block in range(first // n, -(-end // n)):
                if listed[block] >= 0:
                    found[column + block * n - first] = listed[block]
            column += end - first
        return found

    def fill_masked(self, tile_BGRS, rows, keys, value):
        """Write `value` where a row does not see a key. Returns the tile, (B, G, H/G · rows, keys)."""
        n, count = self.call.mask.block, rows[1] - rows[0]
        for column, pattern in self._partial(rows, keys).items():
            part = tile_BGRS.unflatten(2, (-1, count))[..., column : column + n]
            part.masked_fill_(self._hidden(pattern)[:count, : part.shape[-1]], value)
        return tile_BGRS

    def _hidden(self, pattern):
        n = self.call.mask.block
        if is_dry(self.like):
            return self.like.new_empty((n, n), dtype=torch.bool)
        return unpacked(self.call.mask.to(self.like.device).words[pattern]).logical_not_()

    by_hook = SequenceTiles.by_hook

    def places(self, rows, keys):
        """Return (b, h, q_idx, k_idx) of a tile, for hooks."""
        b, h, i, *js = (torch.arange(*each, device=self.like.device)
                        for each in (self.batch, self.query_heads, rows, *keys))
        mask = self.call.mask
        return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i[:, None] + (mask.S - mask.T), torch.cat(js)

    def dropped(self, rows, keys):
        """Return None: nothing is dropped."""


def _spans(blocks, n, S):
    """Return ((first key, end), …) of blocks in order; neighbours are one span."""
    found = []
    for block in blocks:
        if found and found[-1][1] == block * n:
            found[-1][1] = min((block + 1) * n, S)
        else:
            found.append([block * n, min((block + 1) * n, S)])
    return tuple(map(tuple, found))


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


def block_sparse_attention_flops(q_shape: Shape, k_shape: Shape, mask: BlockMask, *,
                                 v_dim: int | None = None) -> AttentionFlops:
    """Count the AttentionFlops of `block_sparse_attention` for shapes (B, H, T, D) and (B, G, S, D): of all pairs in
    listed blocks, seen or not, with the forms of `attention_flops`. They are about `mask.tile_density` of a dense
    attention's. Raises as `block_sparse_attention` does.
    """
    check_fits(q_shape, k_shape, mask, torch.float32, v_dim)
    (B, H, _, D), V = q_shape, v_dim or q_shape[3]
    rows, columns = (torch.tensor([end - first for first, end in tiles((0, length), mask.block)])
                     for length in mask.shape[2:])
    area = int(((mask.kinds() > 0) * rows[:, None] * columns).sum())
    pairs = area * B * H // (mask.shape[0] * mask.shape[1])
    return AttentionFlops(pairs, 2 * (D + V) * pairs, 4 * (D + V) * pairs, (6 * D + 4 * V) * pairs)


def block_sparse_attention_bytes(q_shape: Shape, k_shape: Shape, mask: BlockMask,
                                 dtype: torch.dtype = torch.float32, *, v_dim: int | None = None,
                                 kernels: bool = True) -> AttentionBytes:
    """Predict the AttentionBytes of `block_sparse_attention` for shapes (B, H, T, D) and (B, G, S, D), exact, without
    hooks and without the mask itself, `mask.nbytes`. With elements of e bytes, V the head_dim of v:

        kept   e·BHT·V + 4·BHT                          the output and its logsumexp
        peak   kept + e·BHT·D + e·BGS·(D + V) + 4·BHT   dQ, dK and dV; Δ

    as `flash_attention`'s: linear in the sequence, whatever the mask, whose blocks change time alone. `kernels=False`:
    of the form in PyTorch, with dK and dV in w bytes (fp32 or wider), and the largest tile: n = rows of a block, times
    the batch and query heads that share a list; m = up to 1,024 keys, times the batch and key heads:

        peak   kept + e·BHT·D + w·BGS·(D + V) + w·(n·(2D + V) + m·(D + V) + 2n + 2n·keys + max(n·D, m·D, m·V))

    Raises as `block_sparse_attention` does.
    """
    check_fits(q_shape, k_shape, mask, dtype, v_dim)
    (B, H, T, D), (G, S), V = q_shape, k_shape[1:3], v_dim or q_shape[3]
    e, w = resolve_shapes(q_shape, k_shape, dtype, v_dim=v_dim)[1]
    kept, keys = e * B * H * T * V + w * B * H * T, B * G * S * (D + V)
    if kernels:
        return AttentionBytes(kept, kept + e * (B * H * T * D + keys) + w * B * H * T)
    q, k = (torch.empty(tuple(shape), device="meta") for shape in (q_shape, k_shape))
    tile_bytes = [e * keys * (e != w)]
    for part in BlockSparseCall(1.0, None, mask).parts(q, k):
        for rows, chunks in part.tiles((mask.block, AT_ONCE), lambda shape: True):
            for columns in (sum(end - first for first, end in spans) for spans in chunks or [()]):
                n, m = part.heads[0] * part.heads[1] * (rows[1] - rows[0]), part.heads[0] * part.heads[2] * columns
                tile_bytes.append(w * (n * (2 * D + V) + m * (D + V) + 2 * n + 2 * n * columns +
                                       max(n * D, m * D, m * V)))
    return AttentionBytes(kept, kept + e * B * H * T * D + w * keys + max(tile_bytes))


def check_fits(q_shape, k_shape, mask, dtype, v_dim=None):
    """Raise what a call of these shapes would."""
    q, k = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in (q_shape, k_shape))
    check_tensors(q, k, k if v_dim is None else k.new_empty((*k.shape[:3], v_dim)))
    mask_of(mask, q, k)
