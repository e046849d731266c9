"""Which queries see which keys, as lists of blocks: a block that is on no list is neither loaded nor computed.

    T × S pairs in blocks of n × n:    full: each pair is seen    partial: some are    none: not listed

    by_query    for each block of queries the blocks of keys that it sees: forward and dQ
    by_key      the same lists transposed: dK and dV

A partial block has a pattern, n² bits. Blocks that are alike share one: a window has two, however long the sequence
is. So a mask takes bytes for its blocks, and none for the pairs that nobody sees.

Longformer (Beltagy et al. 2020), section 3.1: a window, dilated or not, and global tokens. BigBird (Zaheer et al.
2020), section 2: these, and random blocks. Lists of blocks, as FlexAttention has them (Dong et al. 2024).
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

AT_ONCE = 2**22  # pairs that a predicate is asked for at a time
NONE, SOME, ALL = 0, 1, 2  # of the pairs of a block
ASK = SOME  # a hint: the predicate tells
INTS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
BLOCKS = (32, 64, 128, 256)  # sizes of a block: words of 32 bits, and tiles of the kernels divide them


@contextlib.contextmanager
def on_host():
    """Make numbers on the CPU, real ones: also in a dry run, and where another device is the default."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


class BlockLists(NamedTuple):
    """Blocks by the block that sees them, or by the one that is seen: int32, those of owner r at ends[r] … ends[r+1],
    the full ones first, up to `full[r]`. Owners count over batch, heads and blocks. `patterns`: −1 of a full block.
    All four are parts of one tensor, `whole`."""

    ends: torch.Tensor
    full: torch.Tensor
    blocks: torch.Tensor
    patterns: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, whole: torch.Tensor, owners: int) -> "BlockLists":
        """Take one tensor apart."""
        listed = (len(whole) - 2 * owners - 1) // 2
        return cls(*whole.split([owners + 1, owners, listed, listed]), whole)


class BlockMask:
    """Holds the lists of blocks of a mask; made by `BlockMask.of`, `longformer_mask` and the others of this module.

    - `T`, `S`: queries and keys; `block`: rows and columns of a block; `batch`, `heads`: 1 if all share the lists.
    - `by_query`, `by_key`: BlockLists; `words`: (patterns, block, block/32) int32, pair (r, c) at bit c mod 32.
    - `pairs`: how many pairs see each other, of batch · heads · T · S. `density`, `tile_density`: shares of pairs, and
      of blocks that are listed.

    `a & b` and `a | b` join two masks; `mask.nbytes` is what the lists take. `figure_masks.plot_masks` draws masks.
    """

    def __init__(self, sees: Callable, shape: tuple, block: int, lists: Sequence[BlockLists], words: torch.Tensor,
                 pairs: int) -> None:
        self.sees, self.shape, self.block = sees, shape, block
        self.by_query, self.by_key = lists
        self.words, self.pairs = words, pairs
        self._there = {words.device: self}
        self.in_dry_run = weakref.WeakKeyDictionary()  # mode of fake tensors → stand-ins of the lists, by name

    @classmethod
    @on_host()
    def of(cls, sees: Callable, T: int, S: int | None = None, *, batch: int = 1, heads: int = 1, block: int = 128,
           hint: Callable | None = None) -> "BlockMask":
        """Cut a predicate into blocks. `sees(b, h, i, j)` gets int64 tensors that broadcast, and returns a boolean one:
        whether query i sees key j. With T < S the last query is beside the last key: i begins at S − T.

        - `batch`, `heads`: how many the predicate tells apart; 1 if it reads no `b`, or no `h`.
        - `hint(b, h, R, C)`: of the block of queries R and keys C: NONE or ALL of its pairs are seen, which saves
          asking the predicate, or ASK. By default it is asked everywhere.

        Raises TypeError or ValueError for sizes that are none, a predicate that returns no booleans, or that does not
        return the same ones twice (it is to depend on places alone), and a hint that the blocks' corners belie.
        """
        S = T if S is None else S
        shape = batch, heads, T, S
        for name, size in zip(("batch", "heads", "T", "S"), shape, strict=True):
            check_size(name, size)
        check_block(block)
        sizes = batch, heads, -(-T // block), -(-S // block)
        places = [torch.arange(n).view(-1, *[1] * (3 - k)) for k, n in enumerate(sizes)]
        hints = torch.as_tensor(ASK if hint is None else hint(*places), dtype=torch.int8).expand(sizes)
        _check_hints(sees, hints, shape, block)
        kinds = hints.clone()  # of blocks: NONE, ALL, or, once all are asked, SOME
        patterns, words = _ask(sees, kinds, shape, block)
        where = kinds.nonzero()
        listed = where, kinds[kinds > 0], patterns[kinds > 0]
        lists = [lists_of(*listed, shape, block, transposed) for transposed in (False, True)]
        return cls(sees, shape, block, lists, words, pairs_of(*listed, words, shape, block))

    @property
    def T(self) -> int:
        """Return the number of queries."""
        return self.shape[2]

    @property
    def S(self) -> int:
        """Return the number of keys."""
        return self.shape[3]

    @property
    def grid(self) -> tuple:
        """Return how many blocks of queries and of keys there are."""
        return -(-self.T // self.block), -(-self.S // self.block)

    @property
    def density(self) -> float:
        """Return the share of pairs that see each other."""
        return self.pairs / _product(self.shape)

    @property
    def tile_density(self) -> float:
        """Return the share of blocks that are listed: what is computed, of what a dense attention computes."""
        return len(self.by_query.blocks) / _product((*self.shape[:2], *self.grid))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the lists and patterns."""
        return sum(x.nbytes for x in (self.by_query.whole, self.by_key.whole, self.words))

    @functools.cached_property
    def listed(self) -> list:
        """List {block of keys: its pattern} of each block of queries, in the order of the sequence, on the host."""
        ends = self.by_query.ends.tolist()
        blocks, patterns = self.by_query.blocks.tolist(), self.by_query.patterns.tolist()
        return [dict(sorted(zip(blocks[first:end], patterns[first:end], strict=True)))
                for first, end in zip(ends, ends[1:], strict=False)]

    def to(self, device: Any) -> "BlockMask":
        """Return the mask with its lists on a device; each device's are made once."""
        device = torch.empty(0, device=device).device
        if device not in self._there:
            lists = [BlockLists.of(each.whole.to(device), len(each.full)) for each in (self.by_query, self.by_key)]
            self._there[device] = BlockMask(self.sees, self.shape, self.block, lists, self.words.to(device), self.pairs)
        return self._there[device]

    @on_host()
    def rows(self, first: int, end: int) -> "BlockMask":
        """Return the mask of queries first … end − 1 over the keys up to the last of them: of a chunk of a sequence.

        ValueError for places outside, or for a mask of other keys than queries.
        """
        if not 0 <= first < end <= self.T == self.S:
            raise ValueError(f"rows {first} to {end} of a mask of {self.T} queries and {self.S} keys: expected places "
                             "of a mask of as many queries as keys")
        n = self.block
        hints = self.kinds()[:, :, first // n : -(-end // n), : -(-end // n)]  # if blocks begin where those of self do
        return BlockMask.of(self.sees, end - first, end, batch=self.shape[0], heads=self.shape[1], block=n,
                            hint=None if first % n else lambda b, h, R, C: hints)

    @on_host()
    def dense(self) -> torch.Tensor:
        """Return the mask as booleans, (batch, heads, T, S): for tests and drawings of short sequences."""
        batch, heads, T, S = self.shape
        b, h, i, j = (torch.arange(n) for n in self.shape)
        return self.sees(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i[:, None] + (S - T), j).expand(self.shape)

    @on_host()
    def kinds(self) -> torch.Tensor:
        """Return (batch, heads, blocks of queries, blocks of keys) int8: NONE not listed, SOME partial, ALL full."""
        owners, (rows, columns) = len(self.by_query.full), self.grid
        found = torch.zeros(owners, columns, dtype=torch.int8)
        of = torch.arange(owners).repeat_interleave(self.by_query.ends.cpu().diff())
        found[of, self.by_query.blocks.cpu().long()] = SOME + (self.by_query.patterns.cpu() < 0).to(torch.int8)
        return found.view(*self.shape[:2], rows, columns)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        return _joined(self, other, operator.and_)

    def __or__(self, other: "BlockMask") -> "BlockMask":
        return _joined(self, other, operator.or_)

    def __repr__(self):
        return (f"<BlockMask {' × '.join(map(str, self.shape))} in blocks of {self.block}: {self.density:.1%} of pairs "
                f"in {self.tile_density:.1%} of blocks, {self.nbytes:,} bytes>")


# --- masks that articles have ----------------------------------------------------------------------------------------


def causal_mask(seq_len: int, *, block: int = 128) -> BlockMask:
    """Return the mask by which a query sees no later key."""
    return BlockMask.of(lambda b, h, i, j: j <= i, seq_len, block=block, hint=_causal)


@on_host()
def longformer_mask(seq_len: int, window: int, global_tokens: int | Iterable[int] = 0, dilation: int = 1, *,
                    causal: bool = False, block: int = 128) -> BlockMask:
    """Return Longformer's mask: a query sees keys at most `window` steps of `dilation` away, and the global tokens,
    which see all and are seen by all. Bytes and FLOPs grow with seq_len · (window · dilation + globals).

    - `window`: on each side: the paper's w is 2 · window. `global_tokens`: the first so many, or their positions.
    - `causal`: no query sees a later key, be it global.

    Raises TypeError or ValueError for a window below 0, a dilation below 1, or positions outside the sequence.
    """
    sees, hint = _longformer(seq_len, window, global_tokens, dilation, block)
    return _mask(sees, hint, seq_len, causal, block)


def _longformer(seq_len, window, global_tokens, dilation, block):
    check_size("seq_len", seq_len)
    check_size("window", window, least=0)
    check_size("dilation", dilation)
    check_block(block)
    is_global, reach = _globals(global_tokens, seq_len, block), window * dilation
    some, all = is_global.view(-1, block).any(1), is_global.view(-1, block).all(1)

    def sees(b, h, i, j):
        near = ((i - j).abs() <= reach) & ((i - j) % dilation == 0)
        return near | is_global[i] | is_global[j]

    def hint(b, h, R, C):
        apart = (R - C).abs() * block  # of two blocks, pair by pair: at most block − 1 more or less
        none = (apart - (block - 1) > reach) & ~some[R] & ~some[C]
        return (~none).to(torch.int8) + (
            (apart + block - 1 <= reach) & (dilation == 1) | all[R] | all[C]).to(torch.int8)

    return sees, hint


@on_host()
def bigbird_mask(seq_len: int, window: int, global_tokens: int | Iterable[int], random_blocks: int, seed: int, *,
                 heads: int = 1, causal: bool = False, block: int = 128) -> BlockMask:
    """Return BigBird's mask: Longformer's, and for each block of queries `random_blocks` blocks of keys more, drawn by
    `seed` from those that it does not see at all, for each of `heads` by itself.

    Raises as `longformer_mask` does, and ValueError for more random blocks than the sequence has.
    """
    sees, hint = _longformer(seq_len, window, global_tokens, 1, block)
    check_size("random_blocks", random_blocks, least=0)
    check_size("heads", heads)
    count = -(-seq_len // block)
    if random_blocks > count:
        raise ValueError(f"random_blocks={random_blocks} with {count} blocks of {block} in {seq_len} tokens: expected "
                         f"at most {count}")
    rows, columns = torch.arange(count)[:, None], torch.arange(count)
    taken = (hint(0, 0, rows, columns) != NONE) | ((columns >= rows) & causal)
    lots = torch.rand(heads, count, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    most, index = lots.masked_fill_(taken, -1).topk(random_blocks)
    drawn = torch.zeros(lots.shape, dtype=torch.bool).scatter_(2, index, most >= 0)

    def sees_more(b, h, i, j):
        return sees(b, h, i, j) | drawn[h, i // block, j // block]

    return _mask(sees_more, lambda b, h, R, C: torch.maximum(hint(b, h, R, C), drawn[h, R, C] * ALL), seq_len, causal,
                 block, heads=heads)


@on_host()
def documents_mask(ids: torch.Tensor, *, causal: bool = False, block: int = 128) -> BlockMask:
    """Return the mask by which a query sees keys of its own document. `ids`: (batch, seq_len) ints, each token's, in
    any order. Raises as `BlockMask.of` does, and ValueError for ids of another shape or that are no ints."""
    if not (isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.numel()) or ids.dtype not in INTS:
        raise ValueError(f"ids are {_described(ids)}: expected ints of shape (batch, seq_len)")
    ids = ids.to("cpu", copy=True)  # what is written to a batch later is not of this mask
    rows = -(-ids.shape[1] // block)
    # of each block the least and the most: two that do not overlap have no document in common
    padded = [torch.nn.functional.pad(ids, (0, rows * block - ids.shape[1]), value=value).view(len(ids), rows, block)
              for value in (int(ids.max()), int(ids.min()))]
    least, most = padded[0].amin(-1), padded[1].amax(-1)

    def hint(b, h, R, C):
        some = (least[b, R] <= most[b, C]) & (least[b, C] <= most[b, R])
        one = (least[b, R] == most[b, R]) & (least[b, C] == most[b, C])
        return some.to(torch.int8) + (some & one).to(torch.int8)

    return _mask(lambda b, h, i, j: ids[b, i] == ids[b, j], hint, ids.shape[1], causal, block, batch=len(ids))


@on_host()
def prefix_mask(lengths: torch.Tensor, seq_len: int, *, block: int = 128) -> BlockMask:
    """Return a causal mask by which all queries also see the first `lengths[b]` keys: (batch,) ints.

    Raises as `BlockMask.of` does, and ValueError for a prefix longer than the sequence, or below 0.
    """
    if not isinstance(lengths, torch.Tensor) or lengths.ndim != 1 or lengths.dtype not in INTS:
        raise ValueError(f"lengths are {_described(lengths)}: expected ints of shape (batch,)")
    lengths = lengths.to("cpu", torch.int64, copy=True)
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= seq_len:
        raise ValueError(f"lengths={lengths.tolist()} with {seq_len} tokens: expected 0 to {seq_len}")
    return BlockMask.of(
        lambda b, h, i, j: (j <= i) | (j < lengths[b]), seq_len, batch=len(lengths), block=block,
        hint=lambda b, h, R, C: torch.maximum(_causal(b, h, R, C), (C * block < lengths[b]).to(torch.int8) + (
            (C + 1) * block <= lengths[b]).to(torch.int8)))


def _causal(b, h, R, C):
    return (C <= R).to(torch.int8) + (C < R).to(torch.int8)


def _mask(sees, hint, seq_len, causal, block, **sizes):
    if causal:
        return BlockMask.of(lambda b, h, i, j: sees(b, h, i, j) & (j <= i), seq_len, block=block, **sizes,
                            hint=lambda *where: torch.minimum(hint(*where), _causal(*where)))
    return BlockMask.of(sees, seq_len, block=block, hint=hint, **sizes)


def _globals(tokens, seq_len, block):
    """Return booleans, for each token, and up to the end of the last block: whether it is global."""
    try:
        places = list(range(tokens) if type(tokens) is int else tokens)
        torch.iinfo(torch.as_tensor(places or [0]).dtype)  # TypeError for booleans and floats: no positions
        places = torch.as_tensor(places, dtype=torch.int64)
    except (TypeError, ValueError):
        raise TypeError(f"global_tokens={tokens!r}: expected how many, or their positions") from None
    if isinstance(tokens, int) and not 0 <= tokens <= seq_len or len(places) and not (
            0 <= int(places.min()) and int(places.max()) < seq_len):
        raise ValueError(f"global_tokens={tokens!r} with seq_len={seq_len}: expected tokens of the sequence, 0 to "
                         f"{seq_len - 1}, or how many of the first ones")
    found = torch.zeros(-(-seq_len // block) * block, dtype=torch.bool)
    found[places] = True
    return found


# --- cutting ---------------------------------------------------------------------------------------------------------


def _check_hints(sees, hints, shape, block):
    """Raise ValueError where a corner of a block is not as its hint says, or is not the same when asked twice."""
    _, _, T, S = shape
    b, h, R, C = (torch.arange(n).view(-1, *[1] * (5 - k)) for k, n in enumerate(hints.shape))
    corners = torch.tensor([0, block - 1])
    i, j = (R * block + corners[:, None]).clamp(max=T - 1) + (S - T), (C * block + corners).clamp(max=S - 1)
    seen, again = (_answer(sees, b, h, i, j) for _ in range(2))
    if not torch.equal(seen, again):
        raise ValueError("the predicate has given two answers for one place: expected one that depends on (b, h, i, j) "
                         "alone")
    hints = hints[..., None, None]
    if (wrong := (seen & (hints == NONE)) | (~seen & (hints == ALL))).any():
        b, h, R, C, *_ = wrong.nonzero()[0].tolist()
        raise ValueError(f"hint({b}, {h}, {R}, {C}) is {int(hints[b, h, R, C])}, and the predicate says else at a "
                         f"corner of that block: expected NONE={NONE}, ALL={ALL}, or ASK={ASK} where in doubt")


def _ask(sees, kinds, shape, block):
    """Ask the predicate about the blocks whose kind is ASK, and write what they are. Return the pattern of each block
    (−1: none), and the patterns' words."""
    _, _, T, S = shape
    patterns, met, words = torch.full(kinds.shape, -1, dtype=torch.int32), {}, []
    if S % block:  # of the last keys' block some are not there
        kinds[..., -1].clamp_(max=ASK)
    asked, inner = (kinds == ASK).nonzero(), torch.arange(block)
    for some in asked.split(max(1, AT_ONCE // block**2)):
        b, h, R, C = (x[:, None, None] for x in some.unbind(1))
        i, j = R * block + inner[:, None], C * block + inner
        # places outside are not asked about: a predicate may read a tensor of the sequence
        seen = _answer(sees, b, h, i.clamp(max=T - 1) + (S - T), j.clamp(max=S - 1)) & (i < T) & (j < S)
        is_some, is_all = seen.flatten(1).any(1), (seen | (i >= T)).flatten(1).all(1)
        at = tuple(some.unbind(1))
        kinds[at] = is_some.to(torch.int8) + (is_some & is_all).to(torch.int8)
        for n in (is_some & ~is_all).nonzero().flatten().tolist():
            bits = packed(seen[n])
            number = met.setdefault(bits.numpy().tobytes(), len(words))
            if number == len(words):
                words.append(bits)
            patterns[tuple(some[n])] = number
    return patterns, torch.stack(words) if words else torch.zeros(0, block, block // 32, dtype=torch.int32)


def pairs_of(where, kinds, patterns, words, shape, block):
    """Count the pairs that see each other."""
    rows = (shape[2] - where[:, 2] * block).clamp(max=block)  # of the last block of queries some are not there
    of_pattern = unpacked(words).flatten(1).sum(1)
    partial = patterns >= 0
    return int((rows[~partial] * block).sum()) + int(of_pattern[patterns[partial].long()].sum())


def _answer(sees, b, h, i, j):
    try:
        seen = sees(b, h, i, j)
    except RuntimeError as error:
        raise ValueError(f"the predicate could not be asked for many places at once: {error}; expected an expression "
                         "of tensors, with & and | in place of `and`, `or` and `if`") from error
    if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool:
        raise TypeError(f"the predicate returned {_described(seen)}: expected a boolean tensor, such as j <= i")
    return seen.expand(torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape))


def packed(seen):
    """Return (n, n/32) int32 of (n, n) booleans: column c is bit c mod 32."""
    bits = seen.view(len(seen), -1, 32).long() << torch.arange(32)
    return bits.sum(-1).to(torch.int32)  # above 2³¹ it wraps, which keeps the bits


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return (…, n, n) booleans of (…, n, n/32) words."""
    octets = words.view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, device=words.device, dtype=torch.uint8)).bitwise_and_(1)
    return bits.flatten(-2).view(torch.bool)


def lists_of(where, kinds, patterns, shape, block, transposed):
    """Return BlockLists of listed blocks, by their queries or by their keys."""
    batch, heads, T, S = shape
    b, h, R, C = where.unbind(1)
    if transposed:
        R, C, T = C, R, S
    count = -(-T // block)
    owner, owners = (b * heads + h) * count + R, batch * heads * count
    # full ones first, and then in the order of the sequence
    order = ((owner * 2 + (kinds == 1)) * (C.max() + 1 if len(C) else 1) + C).argsort()
    counts, full = torch.bincount(owner, minlength=owners), torch.bincount(owner[kinds == 2], minlength=owners)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return BlockLists.of(torch.cat([ends, ends[:-1] + full, C[order], patterns[order]]).to(torch.int32), owners)


@on_host()
def _joined(first, second, how):
    if not isinstance(second, BlockMask):
        raise TypeError(f"a BlockMask with {_described(second)}: expected another one")
    if first.block != second.block:
        raise ValueError(f"a mask in blocks of {first.block} and one of {second.block}: expected one size; make both "
                         "with the same block=")
    sizes = [(a, b) for a, b in zip(first.shape, second.shape, strict=True)]
    if sizes[2][0] != sizes[2][1] or sizes[3][0] != sizes[3][1]:
        raise ValueError(f"a mask of {first.T} queries and {first.S} keys and one of {second.T} and {second.S}: "
                         "expected the same")
    if any(a != b and 1 not in (a, b) for a, b in sizes[:2]):
        raise ValueError(f"a mask of (batch, heads) {first.shape[:2]} and one of {second.shape[:2]}: expected the "
                         "same, or 1")
    batch, heads = (max(each) for each in sizes[:2])

    def at(mask, b, h):  # one that all share is asked as the first
        return b * (mask.shape[0] > 1), h * (mask.shape[1] > 1)

    def sees(b, h, i, j):
        return how(first.sees(*at(first, b, h), i, j), second.sees(*at(second, b, h), i, j))

    kinds = [mask.kinds() for mask in (first, second)]
    if how is operator.or_:  # NONE of both and ALL of either is known; two that are partial may make a full one
        hints = torch.maximum(*kinds)
    else:
        hints = torch.minimum(*kinds)
    return BlockMask.of(sees, first.T, first.S, batch=batch, heads=heads, block=first.block,
                        hint=lambda b, h, R, C: hints)


# --- checks ----------------------------------------------------------------------------------------------------------


def check_size(name, size, least=1):
    """Raise TypeError or ValueError for a size that is no int of at least `least`."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name}={size!r}: expected an int")
    if size < least:
        raise ValueError(f"{name}={size}: expected at least {least}")


def check_block(block):
    """Raise ValueError for a size of blocks that kernels and words do not divide."""
    if block not in BLOCKS:
        raise ValueError(f"block={block!r}: expected one of {', '.join(map(str, BLOCKS))}")


def _described(x):
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _product(sizes):
    return functools.reduce(operator.mul, sizes)
