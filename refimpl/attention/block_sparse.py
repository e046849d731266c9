"""Attention over the blocks of a mask: the tiles of `tiled`, for those blocks alone that are listed.

    for each block of queries:  for each listed block of keys:  the online softmax of `tiled`; in backward dQ, dK, dV

A full block is computed as a dense one; of a partial block the pairs that are not seen become −∞. So FLOPs and bytes
follow the blocks that are listed, `mask.tile_density` of what a dense attention takes. What is not listed costs
nothing: it is not computed and then masked.
"""

import collections.abc
import itertools
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
from .reference import AttentionBytes, AttentionFlops, resolve_shapes, wide_dtype
from .scores import as_kernels_take, hook_of
from .tiled import Tiled

if TYPE_CHECKING:
    from .scores import ScoreHook

Shape = collections.abc.Sequence[int]
FORMS = ("auto", "triton", "tiled")
FEW = 16  # patterns that are unpacked once a pass: with more, those of a tile when it is met, and freed with it
AT_ONCE = 512  # keys that pass a block of queries together: fewer and larger products than block by block


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
    runs = kernels_run_on(q_BHTD.device) or is_dry(q_BHTD) and kernel == "triton"  # a dry run has any device's bytes
    runs = runs and hooks is not None and q_BHTD.dtype in KERNEL_DTYPES
    if kernel == "triton" and not runs:
        raise ValueError(f"kernel='triton' for {q_BHTD.dtype} on {q_BHTD.device} with score={score}: the kernels take "
                         "float16, bfloat16 and float32 on CUDA (capability 8.0 on), or on a CPU with "
                         "TRITON_INTERPRET=1 set before Triton is imported; kernel='tiled' computes the same in "
                         "PyTorch")
    if kernel == "tiled" or not runs:
        call = BlockSparseCall(scale, score, mask)
        _on_device(mask, "words", q_BHTD).detach()  # seen by trackers, also in a dry run that knows what tiles take
        out_BHTV, lse_BHT = Tiled.apply(q_BHTD, k_BGSD, v_BGSV, None, None, call, (mask.block, AT_ONCE))
        return (out_BHTV, lse_BHT) if return_logsumexp else out_BHTV
    check_for_kernels(q_BHTD, k_BGSD, v_BGSV)
    lists = [_on_device(mask, name, q_BHTD) for name in ("by_query", "by_key", "words")]
    out_BHTV, lse2_BHT = sparse_attention_forward(
        q_BHTD, k_BGSD, v_BGSV, *lists, mask.block, *mask.shape[:2], scale,
        *(x.contiguous() if isinstance(x, torch.Tensor) else x for x in hooks))
    return (out_BHTV, lse2_BHT * math.log(2)) if return_logsumexp else out_BHTV  # from base 2, in which kernels count


def _on_device(mask, name, q_BHTD):
    """Return one tensor of a mask on q's device: its lists `by_query` or `by_key`, or `words`. In a dry run its
    stand-in, one for all calls."""
    there = mask.to(q_BHTD.device)
    found = there.words if name == "words" else getattr(there, name).whole
    if not is_dry(q_BHTD):
        return found
    stand_ins = there.in_dry_run.setdefault(q_BHTD.fake_mode, {})
    if name not in stand_ins:
        stand_ins[name] = q_BHTD.new_empty(found.shape, dtype=found.dtype)
    return stand_ins[name]


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

    Raises ValueError for another shape, for numbers besides 0 and −∞ (or the least of its dtype), for one that needs a
    gradient, and for one of a dry run, which has no values.
    """
    check_block(block)
    if attn_mask.requires_grad or is_dry(attn_mask):
        raise ValueError("an attn_mask that needs a gradient, or of a dry run, without values: expected one that is "
                         "known beforehand, such as a BlockMask; numbers that are learned are a hook's to add (score=)")
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
        """List the one part of the call: its tiles say which lists they are of."""
        return [BlockTiles(self, (*q_BHTD.shape[:2], k_BGSD.shape[1]), _limits(self.mask, q_BHTD), q_BHTD, {})]


class Span(NamedTuple):
    """Blocks of queries or of keys, of one list or of several that have as many: a tile is loaded from them."""

    lists: tuple  # whose they are: () all heads', (b,) of a sequence, (b, h) of a head
    blocks: tuple  # of each list its (block, …)
    size: int  # rows of each
    patterns: tuple = ()  # of each {first column in the tile: pattern} of its partial blocks


class BlockTiles(NamedTuple):
    """The blocks of a mask: as `SequenceTiles`. A tile is (1, B, G, H/G · rows, columns) where all heads share a list,
    (1, G, H/G · rows, columns) where those of a sequence do, (lists, rows, columns) where each head has its own.
    """

    call: BlockSparseCall
    shape: tuple  # (B, H, G)
    limits: "torch.Tensor | None"
    like: torch.Tensor  # q: its device, its dtype, and whether the run is dry
    views: dict  # of each tensor, by its id, {list: its blocks}: made once a pass, since making them takes time

    @property
    def sequence(self):
        """Return where the part lies: all of each sequence."""
        T, S = self.call.mask.shape[2:]
        return Sequence((0, T), (0, S), Band(T, S))

    @property
    def heads(self):
        """Return (B, H, G) of one list."""
        batch, heads = self.call.mask.shape[:2]
        return (1, 1, 1) if heads > 1 else (1, *self.shape[1:]) if batch > 1 else self.shape

    def cut(self, by_query, by_key):
        """Return the tensors as they are."""
        return [*by_query, *by_key]

    def tiles(self, sizes, is_new):
        """Yield (rows, [keys, …]), each a Span, AT_ONCE keys at a time."""
        mask, at_once = self.call.mask, sizes[1] // self.call.mask.block
        for row, (first, end) in enumerate(tiles((0, mask.T), mask.block)):
            for lists, listed in self._alike(row):
                spans = [_span(lists, [each[k : k + at_once] for each in listed], mask)
                         for k in range(0, len(listed[0]), at_once)]
                found = [keys for keys in spans if is_new((end - first, len(lists), keys.size, any(keys.patterns)))]
                if found or not spans and is_new((end - first, len(lists))):
                    yield Span(lists, ((row,),) * len(lists), end - first), found

    def _alike(self, row):
        """Yield (lists, [[(block, pattern), …] of each]) for a block of queries: heads whose tiles are of one size
        together, since one product of all is faster than one of each."""
        (batch, heads), (rows, columns) = self.call.mask.shape[:2], self.call.mask.grid
        short = columns - 1 if self.call.mask.S % self.call.mask.block else None
        alike = collections.defaultdict(list)
        for b in range(self.shape[0] if heads > 1 else batch):
            for h in range(self.shape[1] if heads > 1 else 1):
                listed = self.call.mask.listed[(b % batch * heads + h) * rows + row]
                of = (b, h) if heads > 1 else (b,) if batch > 1 else ()
                alike[heads == 1 and of, len(listed), short in listed].append((of, list(listed.items())))
        for group in alike.values():
            yield tuple(zip(*group, strict=True))

    def _blocks(self, x, span):
        """List the views of x that a Span has, one list after the other."""
        if id(x) not in self.views:
            self.views[id(x)] = {}
        views, found = self.views[id(x)], []
        for of, blocks in zip(span.lists, span.blocks, strict=True):
            if len(of) == 2:  # the head of keys that queries of head h see
                of = of[0], of[1] * x.shape[1] // self.shape[1]
            if of not in views:
                views[of] = x[of].split(self.call.mask.block, dim=-2)
            found += [views[of][block] for block in blocks]
        return found

    def load(self, x_BHTD, span):
        """Copy the blocks of a Span into a contiguous tile of wide dtype, the heads of a group as rows of a matrix."""
        tile = torch.cat(self._blocks(x_BHTD, span), dim=-2).to(wide_dtype(x_BHTD.dtype))
        if len(span.lists[0]) == 2:
            return tile.unflatten(0, (-1, span.size))
        return tile.unsqueeze(0).unflatten(-3, (self.shape[2], -1)).flatten(-3, -2)

    def store(self, x_BHTD, span, tile):
        """Copy a tile back to the blocks of a Span, rounded to x's dtype."""
        for there, here in zip(self._blocks(x_BHTD, span), self._by_head(tile, span), strict=True):
            there.copy_(here)

    def add(self, x_BGSD, span, tile):
        """Add a tile to the blocks of a Span."""
        by_block = zip(*(each.unbind() for each in tile.split(self.call.mask.block, dim=-2)), strict=True)
        for there, here in zip(self._blocks(x_BGSD, span), itertools.chain(*by_block), strict=True):
            there.add_(here)

    def _by_head(self, tile, rows):
        """Return a tile of queries with a dimension of heads, if it has one of groups."""
        return tile if len(rows.lists[0]) == 2 else tile.unflatten(-2, (-1, rows.size)).flatten(-4, -3)

    def exp_(self, x):
        """Replace x by e^x, as 2^(x · log2 e): a CPU's e^x takes 5 to 50 times as long at −∞, where much is hidden."""
        return x.mul_(math.log2(math.e)).exp2_()

    def fill_masked(self, tile, rows, keys, value):
        """Write `value`, −∞ or, of weights, 0, where a row does not see a key. Returns the tile."""
        for one, patterns in zip(self._by_head(tile, rows), keys.patterns, strict=True):
            if patterns and self.limits is None:
                one.masked_fill_(self._hidden(patterns, rows.size, one.shape[-1]), value)
                continue
            for column, pattern in patterns.items():
                part = one[..., column : column + self.call.mask.block]
                limit = self.limits[pattern, : rows.size, : part.shape[-1]]
                part.clamp_max_(limit if value else limit.clamp(min=0))
        return tile

    def _hidden(self, patterns, rows, columns):
        """Return (rows, columns) booleans, True where a row does not see a key, of {first column: pattern}: all of a
        tile are unpacked together, since there may be many."""
        n, device = self.call.mask.block, self.like.device
        which, at = (torch.tensor(list(each), device=device) for each in (patterns.values(), patterns))
        bits = unpacked(_on_device(self.call.mask, "words", self.like)[which])
        hidden = torch.zeros(n, -(-columns // n), n, dtype=torch.bool, device=device)
        hidden[:, at // n] = bits.logical_not_().transpose(0, 1)
        return hidden.flatten(1)[:rows, :columns]

    def by_head(self, tile, rows):
        """Return a tile of scores as (B or lists, H or 1, rows, keys)."""
        by_list = self._by_head(tile, rows)
        return by_list.unsqueeze(1) if by_list.ndim == 3 else by_list.flatten(0, -4)

    by_hook = SequenceTiles.by_hook

    def places(self, rows, keys):
        """Return (b, h, q_idx, k_idx) of a tile, for hooks."""
        mask, device = self.call.mask, self.like.device
        b, h = (torch.arange(n, device=device) for n in self.shape[:2])
        h = h.view(-1, 1, 1)
        if rows.lists[0]:
            b, *heads = torch.tensor(rows.lists, device=device).unbind(1)
            h = heads[0].view(-1, 1, 1, 1) if heads else h

        def within(blocks, length):  # (…, 1, 1, places)
            found = (torch.tensor(blocks, device=device)[..., None] * mask.block
                     + torch.arange(mask.block, device=device)).flatten(1)
            return found[found < length].view(len(blocks), 1, 1, -1)

        i, j = within(rows.blocks[:1], mask.T) + (mask.S - mask.T), within(keys.blocks, mask.S)
        return b.view(-1, 1, 1, 1), h, i.mT, j

    def dropped(self, rows, keys):
        """Return None: nothing is dropped."""


def _span(lists, listed, mask):
    """Return the Span of keys of some (block, pattern) of each list."""
    n = mask.block
    blocks = tuple(tuple(block for block, _ in each) for each in listed)
    patterns = tuple({k * n: pattern for k, (_, pattern) in enumerate(each) if pattern >= 0} for each in listed)
    return Span(lists, blocks, sum(min(n, mask.S - block * n) for block in blocks[0]), patterns)


def _limits(mask, like):
    """Return the numbers that scores are clamped to, +∞ or −∞, of each pattern; None if they are many."""
    if len(mask.words) > FEW:
        return None
    words = _on_device(mask, "words", like)
    if is_dry(like):
        return like.new_empty((len(words), mask.block, mask.block), dtype=wide_dtype(like.dtype))
    return unpacked(words).to(wide_dtype(like.dtype)).sub_(0.5).mul_(math.inf)


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
    batch and heads; m = up to 512 keys, times batch and key heads (heads, if each has its list); and limits, w·block²
    for each pattern, if they are up to 16:

        peak   kept + e·BHT·D + w·BGS·(D + V) + limits
               + w·(n·(2D + V) + m·(D + V) + 2n + 2n·keys + max(n·D, m·D, m·V))

    A pattern is unpacked in n² bytes more, which is the peak where tiles are smaller than that. If they are more than
    16, those of a tile are unpacked together, in up to 3 bytes a pair of a list, before dP is there, which takes more.

    Raises as `block_sparse_attention` does.
    """
    check_fits(q_shape, k_shape, mask, dtype, v_dim)
    (B, H, T, D), (G, S), V = q_shape, k_shape[1:3], v_dim or q_shape[3]
    e, w = resolve_shapes(q_shape, k_shape, dtype, v_dim=v_dim)[1]
    kept, keys = e * B * H * T * V + w * B * H * T, B * G * S * (D + V)
    if kernels:
        return AttentionBytes(kept, kept + e * (B * H * T * D + keys) + w * B * H * T)
    q, k = (torch.empty(tuple(shape), device="meta") for shape in (q_shape, k_shape))
    limits = w * mask.block**2 * len(mask.words) * (len(mask.words) <= FEW)
    tile_bytes = [e * keys * (e != w), limits // w * (w + 1)]  # dK and dV rounded; limits beside booleans
    part, = BlockSparseCall(1.0, None, mask).parts(q, k)
    for rows, chunks in part.tiles((mask.block, AT_ONCE), lambda shape: True):
        of_query, of_key = (len(rows.lists) * math.prod(heads) for heads in (part.heads[:2], part.heads[::2]))
        for columns in [span.size for span in chunks] or [0]:
            n, m = of_query * rows.size, of_key * columns
            tile_bytes.append(limits + w * (n * (2 * D + V) + m * (D + V) + 2 * n + 2 * n * columns +
                                            max(n * D, m * D, m * V)))
    return AttentionBytes(kept, kept + e * B * H * T * D + w * keys + max(tile_bytes))


def check_fits(q_shape, k_shape, mask, dtype, v_dim=None):
    """Raise what a call of these shapes would."""
    q, k = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in (q_shape, k_shape))
    check_tensors(q, k, k if v_dim is None else k.new_empty((*k.shape[:3], v_dim)))
    mask_of(mask, q, k)
