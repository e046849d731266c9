"""Lists of blocks: every pair of a mask is in them once, by query and by key, full or with its bits."""

import itertools
import operator

import pytest
import torch

from refimpl import memory
from refimpl.attention.masks import (
    ALL,
    ASK,
    NONE,
    BlockMask,
    _longformer,
    bigbird_mask,
    causal_mask,
    documents_mask,
    longformer_mask,
    prefix_mask,
    unpacked,
)

IDS = torch.tensor([[0] * 70 + [1] * 100 + [2] * 30, [3, 1, 3] * 66 + [3, 3]])
LENGTHS = torch.tensor([0, 100, 200])
MASKS = {
    "causal": lambda block, length=200: causal_mask(length, block=block),
    "window": lambda block: longformer_mask(200, 20, block=block),
    "causal window, globals": lambda block: longformer_mask(200, 20, 3, causal=True, block=block),
    "dilated, globals anywhere": lambda block: longformer_mask(200, 7, [5, 130], 3, block=block),
    "wide window": lambda block: longformer_mask(200, 150, block=block),
    "bigbird": lambda block: bigbird_mask(200, 10, 2, 1, 0, heads=3, block=block),
    "causal bigbird": lambda block: bigbird_mask(200, 10, 2, 2, 5, heads=2, causal=True, block=block),
    "documents": lambda block: documents_mask(IDS, block=block),
    "causal documents": lambda block: documents_mask(IDS, causal=True, block=block),
    "prefixes": lambda block: prefix_mask(LENGTHS, 200, block=block),
    "any predicate": lambda block: BlockMask.of(lambda b, h, i, j: (i * 7 + j * 3 + h) % 11 < b, 150, 200, batch=3,
                                                heads=2, block=block),
    "nothing": lambda block: BlockMask.of(lambda b, h, i, j: i + j < 0, 40, block=block),
    "a union": lambda block: longformer_mask(200, 9, block=block) | bigbird_mask(200, 0, 1, 1, 3, heads=2, block=block),
    "an intersection": lambda block: documents_mask(IDS, block=block) & causal_mask(200, block=block)
    & longformer_mask(200, 50, block=block),
}


def written_out(lists, mask, by_key=False):
    """(batch, heads, T, S) booleans of BlockLists; each block at most once, the full ones first."""
    n, (rows, columns) = mask.block, mask.grid
    found = torch.zeros(*mask.shape[:2], rows, columns, n, n, dtype=torch.bool)
    patterns = torch.cat([unpacked(mask.words), torch.ones(1, n, n, dtype=torch.bool)])
    for owner, (b, h, at) in enumerate(itertools.product(*map(range, (*mask.shape[:2], columns if by_key else rows)))):
        first, full, end = int(lists.ends[owner]), int(lists.full[owner]), int(lists.ends[owner + 1])
        blocks = lists.blocks[first:end].tolist()
        assert len(set(blocks)) == len(blocks)
        assert all(lists.patterns[first:full] == -1) and all(lists.patterns[full:end] >= 0)
        for other, pattern in zip(blocks, lists.patterns[first:end].tolist(), strict=True):
            found[(b, h, other, at) if by_key else (b, h, at, other)] = patterns[pattern]
    whole = found.transpose(3, 4).reshape(*mask.shape[:2], rows * n, columns * n)
    assert not whole[:, :, : mask.T, mask.S :].any(), "a key that is not there is seen"
    return whole[:, :, : mask.T, : mask.S]


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_the_lists_are_the_mask(name, block):
    mask = MASKS[name](block)
    seen, n = mask.dense(), mask.block
    assert torch.equal(written_out(mask.by_query, mask), seen)
    assert torch.equal(written_out(mask.by_key, mask, by_key=True), seen)
    assert mask.pairs == int(seen.sum()) and mask.density == pytest.approx(float(seen.float().mean()))
    some = torch.nn.functional.max_pool2d(seen.flatten(0, 1).float(), n, ceil_mode=True).view(mask.kinds().shape) > 0
    assert torch.equal(mask.kinds() > NONE, some) and mask.tile_density == pytest.approx(float(some.float().mean()))


@pytest.mark.parametrize("name", ["causal", "window", "dilated, globals anywhere", "bigbird", "documents", "prefixes"])
def test_what_is_hinted_is_what_the_predicate_says(name):
    mask = MASKS[name](32)
    asked = BlockMask.of(mask.sees, mask.T, mask.S, batch=mask.shape[0], heads=mask.shape[1], block=32)
    assert all(torch.equal(a.whole, b.whole) for a, b in ((mask.by_query, asked.by_query), (mask.by_key, asked.by_key)))
    assert torch.equal(mask.words, asked.words) and mask.pairs == asked.pairs


def test_a_block_that_a_window_just_covers_is_not_asked():
    """Its farthest pair, 2 · 32 − 1 tokens apart, is as far as the window reaches."""
    hints = [_longformer(128, reach, 0, 1, 32)[1](0, 0, torch.tensor(0), torch.tensor(1)) for reach in (62, 63)]
    assert hints == [ASK, ALL]


def test_masks_are_those_of_the_papers():
    i, j = torch.arange(50)[:, None], torch.arange(50)
    near, far = (i - j).abs() <= 6, (i < 2) | (j < 2)
    assert torch.equal(longformer_mask(50, 6, 2, block=32).dense()[0, 0], near | far)
    assert torch.equal(longformer_mask(50, 3, 0, 2, block=32).dense()[0, 0], near & ((i - j) % 2 == 0))
    assert torch.equal(longformer_mask(50, 6, [0, 1], causal=True, block=32).dense()[0, 0], (near | far) & (j <= i))
    mask = bigbird_mask(640, 10, 1, 2, seed=7, heads=2, block=32)
    base = longformer_mask(640, 10, 1, block=32).kinds()
    more = (mask.kinds() > NONE) & (base == NONE)
    assert (more.sum(-1)[0, :, 1:] == 2).all() and (mask.kinds()[more] == ALL).all()  # the first block sees all
    assert not torch.equal(more[0, 0], more[0, 1]), "heads draw by themselves"
    assert torch.equal(mask.words, bigbird_mask(640, 10, 1, 2, seed=7, heads=2, block=32).words)


def test_what_is_written_to_ids_or_lengths_later_is_not_of_the_mask():
    ids, lengths = IDS.clone(), torch.tensor([0, 100])
    masks = documents_mask(ids, block=32), prefix_mask(lengths, 200, block=32)
    seen = [(mask & causal_mask(200, block=32)).dense() for mask in masks]
    ids.zero_(), lengths.fill_(200)
    assert all(torch.equal((mask & causal_mask(200, block=32)).dense(), each)
               for mask, each in zip(masks, seen, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_defaults_of_the_process_change_no_mask(name):
    before = MASKS[name](32)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            after = MASKS[name](32)
            assert torch.equal(after.by_query.whole, before.by_query.whole) and torch.equal(after.words, before.words)
            assert torch.equal(after.dense(), before.dense())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_mask_is_made_inside_a_dry_run():
    made = memory.dry_run(lambda: longformer_mask(200, 9, 2, block=32) & causal_mask(200, block=32)).result
    assert torch.equal(made.dense(), longformer_mask(200, 9, 2, block=32, causal=True).dense())


def test_a_window_takes_bytes_for_its_blocks_and_for_two_patterns():
    sizes = []
    for T in (4096, 8192):
        mask = longformer_mask(T, 1024, causal=True)
        rows = T // 128
        listed = 9 * rows - 36  # the first eight blocks of queries see fewer
        assert len(mask.words) == 2 and len(mask.by_query.blocks) == listed
        assert mask.nbytes == 2 * 4 * (2 * rows + 1 + 2 * listed) + 2 * 128 * 128 // 8
        sizes.append(mask.nbytes)
    assert sizes[1] < 2.05 * sizes[0]


def test_the_predicate_is_asked_about_blocks_that_are_in_doubt_alone():
    asked = 0

    def sees(b, h, i, j):
        nonlocal asked
        asked += torch.broadcast_shapes(i.shape, j.shape).numel()
        return (j <= i) & (i - j < 128)

    def hint(b, h, R, C):
        return torch.where((C == R) | (C == R - 1), ASK, NONE)

    mask = BlockMask.of(sees, 4096, hint=hint)
    blocks, corners = 32 + 31, 32 * 32 * 4
    assert len(mask.by_query.blocks) == blocks and asked == blocks * 128**2 + 2 * corners


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: longformer_mask(0, 3), ValueError, "seq_len=0: expected at least 1"),
    (lambda: longformer_mask(10, -1), ValueError, "window=-1: expected at least 0"),
    (lambda: longformer_mask(10, 2.5), TypeError, "window=2.5: expected an int"),
    (lambda: longformer_mask(10, 2, 11), ValueError, "global_tokens=11 with seq_len=10"),
    (lambda: longformer_mask(10, 2, [3, 10]), ValueError, r"global_tokens=\[3, 10\] with seq_len=10"),
    (lambda: longformer_mask(10, 2, "all"), TypeError, "global_tokens='all': expected how many"),
    (lambda: longformer_mask(10, 2, torch.ones(10, dtype=torch.bool)), TypeError, "expected how many, or their pos"),
    (lambda: longformer_mask(10, 2, [1, 2.5]), TypeError, r"global_tokens=\[1, 2.5\]: expected how many"),
    (lambda: longformer_mask(10, 2, dilation=0), ValueError, "dilation=0: expected at least 1"),
    (lambda: longformer_mask(10, 2, block=100), ValueError, "block=100: expected one of 32, 64, 128, 256"),
    (lambda: bigbird_mask(100, 2, 0, 5, 0, block=32), ValueError, "random_blocks=5 with 4 blocks of 32 in 100 tokens"),
    (lambda: bigbird_mask(100, 2, 0, -1, 0, block=32), ValueError, "random_blocks=-1: expected at least 0"),
    (lambda: documents_mask(torch.zeros(5)), ValueError, "ids are torch.float32 of shape"),
    (lambda: documents_mask(torch.zeros(1, 0, dtype=torch.int64)), ValueError, r"of shape \(1, 0\): expected ints"),
    (lambda: prefix_mask(torch.tensor([9]), 8), ValueError, r"lengths=\[9\] with 8 tokens"),
    (lambda: BlockMask.of(lambda b, h, i, j: i - j, 10), TypeError, "the predicate returned torch.int64 of shape"),
    (lambda: BlockMask.of(lambda b, h, i, j: i >= j and i > 0, 10), ValueError, "with & and | in place of `and`"),
    (lambda: BlockMask.of(lambda b, h, i, j: torch.rand((i * j).shape) < 0.5, 2000), ValueError, "two answers for one"),
    (lambda: BlockMask.of(lambda b, h, i, j: j <= i, 100, block=32, hint=lambda b, h, R, C: R * 0 + C * 0), ValueError,
     r"hint\(0, 0, 0, 0\) is 0, and the predicate says else"),
    (lambda: causal_mask(10) & causal_mask(11), ValueError, "a mask of 10 queries and 10 keys and one of 11 and 11"),
    (lambda: causal_mask(10) | causal_mask(10, block=32), ValueError, "in blocks of 128 and one of 32: expected"),
    (lambda: bigbird_mask(100, 1, 0, 0, 0, heads=2) & bigbird_mask(100, 1, 0, 0, 0, heads=3), ValueError,
     r"\(batch, heads\) \(1, 2\) and one of \(1, 3\)"),
    (lambda: causal_mask(10) & True, TypeError, "a BlockMask with a bool: expected another one")])
def test_what_is_no_mask_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("how", [operator.and_, operator.or_])
def test_joined_masks_ask_only_where_both_leave_it_open(how):
    first, second = longformer_mask(300, 40, block=32), longformer_mask(300, 100, [250], causal=True, block=32)
    joined = how(first, second)
    assert torch.equal(joined.dense(), how(first.dense(), second.dense()))


@pytest.mark.parametrize(("first", "end"), [(0, 32), (64, 150), (40, 100), (149, 150)])
def test_rows_of_a_mask_see_what_they_see_in_the_whole(first, end):
    whole = bigbird_mask(150, 20, {0, 70}, 1, 0, heads=2, causal=True, block=32)
    rows = whole.rows(first, end)
    assert torch.equal(rows.dense(), whole.dense()[:, :, first:end, :end]) and rows.shape == (1, 2, end - first, end)
    assert rows.pairs == int(rows.dense().sum())
    chunks = [whole.rows(first, min(first + 64, 150)) for first in range(0, 150, 64)]
    assert sum(len(each.by_query.blocks) for each in chunks) == len(whole.by_query.blocks)
    for wrong in ((-1, 5), (5, 5), (0, 151)):
        with pytest.raises(ValueError, match=r"rows .* of a mask of 150 queries"):
            whole.rows(*wrong)
