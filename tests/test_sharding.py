"""Parts of tensors: any two cuts of one exchange each element once, and what ranks hold is each element once."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from refimpl import sharding
from refimpl.sharding import Shard, ShardSpec, check_specs, copy_overlap, set_spec, spec_of


def whole(shape):
    """Numbers that tell where they are from."""
    return torch.arange(math.prod(shape)).view(shape)


def taken(tensor, spec):
    """The elements of a spec, by indexing alone."""
    block = tensor[tuple(slice(o, o + n) for o, n in zip(spec.offsets, spec.lengths, strict=True))]
    return block.reshape(-1)[spec.first : spec.end].clone()


@st.composite
def cuts(draw, shape):
    """Specs that are each element of a tensor once: a grid of blocks, each in flat parts."""
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    found = []
    for corner in itertools.product(*(itertools.pairwise(each) for each in edges)):
        offsets, lengths = tuple(a for a, _ in corner), tuple(b - a for a, b in corner)
        numel = math.prod(lengths)
        ends = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        found += [ShardSpec("x", shape, offsets, lengths, a, b) for a, b in itertools.pairwise(ends)]
    return found


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.data(), shapes)
def test_any_two_cuts_of_a_tensor_exchange_each_element_once(data, shape):
    x, (before, after) = whole(shape), (data.draw(cuts(shape)) for _ in range(2))
    moved = 0
    for target in after:
        flat = torch.full((target.numel,), -1)
        for source in before:
            copy_overlap(flat, target, taken(x, source), source)
            moved += sum(math.prod(view.size) for view, _ in sharding.overlaps(target, source))
        assert torch.equal(flat, taken(x, target))
    assert moved == x.numel()


@given(st.data(), shapes)
def test_a_cut_has_few_boxes_that_lie_one_after_the_other(data, shape):
    x = whole(shape)
    for spec in data.draw(cuts(shape)):
        boxes = spec.boxes()
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert [place for _, _, place in boxes] == list(itertools.accumulate(
            (math.prod(lengths) for _, lengths, _ in boxes[:-1]), initial=0))[:len(boxes)]
        found = [taken(x, ShardSpec("x", shape, offsets, lengths)) for offsets, lengths, _ in boxes]
        assert torch.equal(torch.cat([*found, torch.zeros(0, dtype=torch.int64)]), taken(x, spec))


@given(st.data(), shapes)
def test_what_is_each_element_once_has_no_fault_and_without_a_part_it_has(data, shape):
    specs = data.draw(cuts(shape))
    check_specs([[spec] for spec in specs])
    for spec in specs if math.prod(shape) else ():
        rest = [[other] for other in specs if other is not spec]
        if spec.numel and rest:
            with pytest.raises(ValueError, match=r"x: .* on no rank"):
                check_specs(rest)
        if spec.numel:
            with pytest.raises(ValueError, match=r"x: elements \d+ … \d+.* are on rank \d+ and on rank \d+"):
                check_specs([*rest, [spec], [spec]])


@pytest.mark.parametrize(("shape", "order"), [((2, 3, 2, 2), (0, 2, 3, 1)), ((3, 2, 1, 2, 2), (0, 2, 3, 4, 1))])
def test_elements_move_between_row_major_and_another_order(shape, order):
    x = whole(shape)
    memory, n = x.permute(order).reshape(-1), x.numel()
    for first, end in itertools.combinations(range(n + 1), 2):
        mine, other = ShardSpec("x", shape, first=first, end=end, order=order), ShardSpec("x", shape)
        found, back = torch.full((n,), -1), torch.zeros(end - first, dtype=torch.int64)
        copy_overlap(found, other, memory[first:end], mine)
        copy_overlap(back, mine, x.view(-1), other)
        assert torch.equal(back, memory[first:end]) and sorted(found[found >= 0].tolist()) == sorted(back.tolist())
        assert torch.equal(found[back], back) and mine.cut(first, end) == mine
    half = [ShardSpec("x", shape, first=a, end=b, order=order) for a, b in ((0, 5), (5, n))]
    check_specs([[each] for each in half])
    with pytest.raises(ValueError, match="x: its blocks .* have elements in common"):
        check_specs([*([each] for each in half), [ShardSpec("x", shape)]])
    with pytest.raises(ValueError, match="x: elements 5 … .* are on no rank"):
        check_specs([half[:1], [ShardSpec("x", shape, first=5)]])


# --- by name ---------------------------------------------------------------------------------------------------------


def spec(*args, name="x", shape=(6, 4), **kwargs):
    return ShardSpec(name, shape, *args, **kwargs)


left, right = functools.partial(spec, (0, 0), (6, 2)), functools.partial(spec, (0, 2), (6, 2))


def test_the_whole_is_the_default():
    assert spec() == spec((0, 0), (6, 4), 0, 24, ()) and spec().numel == 24
    assert ShardSpec("x", ()).boxes() == [((), (), 0)] and ShardSpec("x", (3, 0)).boxes() == []
    assert spec((1, 1), (4, 2)).cut(3, 6).boxes() == [((2, 2), (1, 1), 0), ((3, 1), (1, 2), 1)]
    assert ShardSpec("x", torch.Size((2, 3)), replicas=[0, 1]) == ShardSpec("x", (2, 3), replicas=(0, 1))


@pytest.mark.parametrize(("make", "said"), [
    (lambda: spec((0, 1), (6, 4)), r"x: a block of \(6, 4\) at \(0, 1\): expected a part of \(6, 4\)"),
    (lambda: spec((0,), (6,)), r"x: a block of \(6,\) at \(0,\): expected a part of \(6, 4\)"),
    (lambda: left(3, 13), r"x: elements \[3, 13\]: expected a part of 12 elements"),
    (lambda: left(3, 2), r"x: elements \[3, 2\]: expected a part of 12 elements"),
    (lambda: left(3, 9).cut(2, 4), r"x: cut to elements \[2, 4\]: expected a part of \[3, 9\], which is here"),
    (lambda: set_spec(nn.Parameter(torch.zeros(2, 4)), left()), r"x: the parameter has shape \(2, 4\), its spec 12 "),
    (lambda: set_spec(nn.Parameter(torch.zeros(6, 2)), left(0, 3)), r"its spec 3 elements of a block of \(6, 2\)"),
    (lambda: Shard(left(), torch.zeros(11), "frozen", torch.float32), r"x: values has 11 elements: expected 12"),
    (lambda: Shard(left(0, 3), torch.zeros(3), "parameters", torch.float32, nn.Parameter(torch.zeros(6, 2))),
     r"x: own has 12 elements: expected 3, as its spec says"),
    (lambda: Shard(left(), torch.zeros(12), "frozen", torch.float32, owned=right()), "x: owned is .*: expected a cut")])
def test_parts_that_cannot_be(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_parameter_keeps_what_was_said_of_it():
    p = nn.Parameter(torch.zeros(6, 2))
    assert spec_of("y", p) == ShardSpec("y", (6, 2))
    set_spec(p, right())
    assert (spec_of("y", p), sharding.names_of("y", p), sharding.room_of(p)) == (right(), ("y",), 12)
    set_spec(p, right(), ["x", "z"], 18)
    assert (sharding.names_of("y", p), sharding.room_of(p)) == (("x", "z"), 18)


BOTH = (0, 1)


@pytest.mark.parametrize(("specs", "said"), [
    ([[left()], [right()]], None), ([[spec(replicas=BOTH)], [spec(replicas=BOTH)]], None),
    ({5: [left(0, 7)], 7: [right(replicas=(7, 9))], 9: [right(replicas=(7, 9))], 6: [left(7)]}, None),
    ([[spec()], [spec(name="y")]], None), ([[ShardSpec("x", ())]], None), ([[ShardSpec("x", (0, 3))], []], None),
    ([[left(), right()], [spec(name="y")]], None), ([[left(), right(replicas=BOTH)], [right(replicas=BOTH)]], None),
    ([[left(), left()], [right()]], r"x: elements 0 … 11 of its block .* are on rank 0 and on rank 0"),
    ([[left(), right(replicas=BOTH)] * 2, [right(replicas=BOTH)]], r"x: ranks \[0, 0, 1\] name ranks \[0, 1\]"),
    ([[left()], []], "x: 12 of its 24 elements are on no rank"),
    ([[left()], [right(0, 5)]], r"x: elements 5 … 11 of its block of \(6, 2\) at \(0, 2\) are on no rank"),
    ([[spec(None, None, 0, 4)], [spec(None, None, 6)]], "x: elements 4 … 5 are on no rank"),
    ([[spec()], [spec()]], r"x: elements 0 … 23 are on rank 0 and on rank 1: ranks that hold the same name each other"),
    ([[spec()], [left()]], r"x: its blocks of \(6, 4\) at \(0, 0\), on rank 0, and of \(6, 2\) at \(0, 0\), on rank 1"),
    ([[left(0, 8)], [left(7)], [right()]], r"x: elements 7 … 7 of its block .* are on rank 0 and on rank 1"),
    ([[spec(replicas=BOTH)], [spec()]], r"x: ranks \[0\] name ranks \[0, 1\] as replicas of elements \[0, 24\]"),
    ([[spec(replicas=BOTH)], [left(replicas=BOTH)]], r"x: ranks \[0\] name ranks \[0, 1\]"),
    ([[spec(replicas=(1,))], []], r"x: ranks \[0\] name ranks \[1\]"),
    ([[left()], [ShardSpec("x", (6, 5), (0, 2), (6, 3))]], r"x has shape \(6, 4\) on rank 0 and \(6, 5\) on rank 1")])
def test_what_ranks_hold_is_each_element_once(specs, said):
    if said is None:
        return check_specs(specs)
    with pytest.raises(ValueError, match=said):
        check_specs(specs)


def test_of_replicas_one_counts():
    pair = left(replicas=BOTH)
    assert sharding.check_replicas([[pair], [pair], [right()]]) == [(0, pair), (2, right())]


def test_offsets_matter():
    """The mutant takes a block for the first one of its shape."""
    x = whole((6, 4))
    found, at_zero = torch.zeros(2, 12, dtype=torch.int64)
    copy_overlap(found, right(), x.flatten(), spec())
    copy_overlap(at_zero, left(), x.flatten(), spec())
    assert torch.equal(found, taken(x, right())) and not torch.equal(at_zero, found)
