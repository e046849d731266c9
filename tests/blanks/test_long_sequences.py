"""Ours and other right functions pass, wrong and unanswered ones do not."""

from fractions import Fraction
from functools import partial

import numpy as np
import torch
from exercises_kit import Answers, graded

from blanks import long_sequences as page
from refimpl.common.quadratic import Quadratic

# --- fit -------------------------------------------------------------------------------------------------------------


def fit_with_the_library(points):
    found = Quadratic.fit(points)
    return found.a, found.b, found.c


def fit_by_lagrange(points):
    a = b = c = Fraction(0)
    for s, y in points.items():
        (p, q), share = [each for each in points if each != s], Fraction(y)
        share /= (s - p) * (s - q)
        a, b, c = a + share, b - share * (p + q), c + share * p * q
    return int(a), int(b), int(c)


def fit_by_cramer(points):
    s, y = list(points), list(points.values())
    def det(*columns):
        (a, b, c), (d, e, f), (g, h, i) = columns
        return a * (e * i - f * h) - d * (b * i - c * h) + g * (b * f - c * e)
    basis = [each * each for each in s], s, [1, 1, 1]
    whole = det(*basis)
    return tuple(det(*(y if k == at else basis[k] for k in range(3))) // whole for at in range(3))


def fit_at_equal_distances(points):
    (s1, y1), (s2, y2), (_, y3) = sorted(points.items())
    a = (y3 - 2 * y2 + y1) // (2 * (s2 - s1) ** 2)
    b = (y2 - y1) // (s2 - s1) - a * (s1 + s2)
    return a, b, y1 - a * s1 * s1 - b * s1


def fit_with_numpy(points):
    """In fp64, of which some coefficients need more."""
    matrix = torch.tensor([[s * s, s, 1] for s in points], dtype=torch.float64)
    found = torch.linalg.solve(matrix, torch.tensor(list(points.values()), dtype=torch.float64))
    return tuple(int(each) for each in found)


def fit_a_line(points):
    (s1, y1), *_, (s3, y3) = points.items()
    slope = (y3 - y1) // (s3 - s1)
    return 0, slope, y1 - slope * s1


def fit_with_half_of_a(points):
    (s1, y1), (s2, y2), (s3, y3) = points.items()
    first, second = (y2 - y1) // (s2 - s1), (y3 - y2) // (s3 - s2)
    a = (second - first) // (s3 - s2)
    b = first - a * (s1 + s2)
    return a, b, y1 - a * s1 * s1 - b * s1


def fit_with_the_wrong_slope(points):
    (s1, y1), (s2, y2), _ = points.items()
    a = page.fit(points)[0]
    b = (y2 - y1) // (s2 - s1)
    return a, b, y1 - a * s1 * s1 - b * s1


def fit_by_polyfit(points):
    return tuple(np.polyfit(list(points), list(points.values()), 2))


def fit_through_zero(points):
    a, b, _ = page.fit(points)
    return a, b, 0


# --- carry -----------------------------------------------------------------------------------------------------------


class Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new, keys, gradients, first, last):
        ctx.gradients, ctx.place = gradients, (first, last)
        return torch.cat((keys[:, :, :first], new), 2)

    @staticmethod
    def backward(ctx, gradient):
        first, last = ctx.place
        ctx.gradients[:, :, :last].add_(gradient)
        return ctx.gradients[:, :, first:last].clone(), None, None, None, None


def carry_by_a_function(new, keys, gradients, first, last):
    keys[:, :, first:last].copy_(new.detach())
    return Carry.apply(new, keys, gradients, first, last)


def carry_by_a_leaf(new, keys, gradients, first, last):
    """Earlier keys are a leaf; the gradient of the new ones is completed on its way."""
    keys[:, :, first:last] = new.detach()
    past = keys[:, :, :first].detach()
    if gradients is not None:
        past = past.clone().requires_grad_()
        past.register_hook(lambda gradient: gradients[:, :, :first].add_(gradient) * 0)

        def complete(gradient):
            gradients[:, :, first:last] += gradient
            return gradients[:, :, first:last].clone()

        if new.requires_grad:
            new = new * 1
            new.register_hook(complete)
    return torch.cat((past, new), dim=2)


def carried(new, keys, gradients, first, last, *, store=True, add=True, give="all", detach=True, earlier=True,
            whole=False, expand=False, graph=False):
    """Carry with a fault."""
    if store:
        keys[:, :, first:last] = new.detach() if detach else new
    if gradients is None and not graph:
        return keys if whole else keys[:, :, :last]
    past = keys[:, :, :first] if earlier else torch.zeros_like(keys[:, :, :first])
    every = torch.cat((past, new), dim=2)
    if expand:
        every = torch.cat([every] * 8)[: len(new)]

    def collect(gradient):
        if add:
            gradients[:, :, :last] += gradient
        else:
            gradients[:, :, :last] = gradient
        return {"all": gradients[:, :, :last], "own": gradient, "none": None}[give]

    if gradients is not None:
        every.register_hook(collect)
    return every


def new_alone(new, keys, gradients, first, last):
    carried(new, keys, gradients, first, last)
    return new


def only_the_own_part(new, keys, gradients, first, last):
    """Adds to the sums what belongs to the chunk itself, and drops what belongs to earlier ones."""
    keys[:, :, first:last] = new.detach()
    if gradients is None:
        return keys[:, :, :last]
    every = torch.cat((keys[:, :, :first], new), dim=2)

    def collect(gradient):
        gradients[:, :, first:last] += gradient[:, :, first:last]
        return torch.cat((gradient[:, :, :first], gradients[:, :, first:last]), 2)

    every.register_hook(collect)
    return every


def twice_its_own(new, keys, gradients, first, last):
    every = carried(new, keys, None, first, last)
    if gradients is None:
        return every

    def collect(gradient):
        gradients[:, :, :last] += gradient
        return gradient + gradients[:, :, :last]

    every = torch.cat((keys[:, :, :first], new), dim=2)
    every.register_hook(collect)
    return every


def only_of_earlier_ones(new, keys, gradients, first, last):
    """Right gradients of all keys, of which the chunk's own part is nowhere but in `new`."""
    every = carried(new, keys, None, first, last)
    if gradients is None:
        return every

    def collect(gradient):
        gradients[:, :, :first] += gradient[:, :, :first]
        return torch.cat((gradient[:, :, :first], gradient[:, :, first:] + gradients[:, :, first:last]), 2)

    every = torch.cat((keys[:, :, :first], new), dim=2)
    every.register_hook(collect)
    return every


def by_two_hooks(new, keys, gradients, first, last):
    """The same, by a hook on earlier keys and one on the new ones."""
    every = carried(new, keys, None, first, last)
    if gradients is None:
        return every
    past = keys[:, :, :first].detach().requires_grad_()
    past.register_hook(gradients[:, :, :first].add_)
    new.register_hook(lambda gradient: gradient + gradients[:, :, first:last])
    return torch.cat((past, new), dim=2)


def a_broken_hook(new, keys, gradients, first, last):
    every = carried(new, keys, None, first, last)
    if gradients is not None:
        every = torch.cat((keys[:, :, :first], new), dim=2)
        every.register_hook(lambda gradient: gradients[:, :, : last + 1].add_(gradient))
    return every


# --- train_in_chunks --------------------------------------------------------------------------------------------------


def train_with_a_while(loss_of_chunk, length, chunk_size):
    keys, losses, first = {}, [], 0
    while first < length:
        last = first + chunk_size if first + chunk_size < length else length
        with torch.set_grad_enabled(False):
            losses.append(loss_of_chunk(first, last, keys, None))
        first = last
    gradients = {name: 0 * each for name, each in keys.items()}
    last = length
    while last:
        first = (last - 1) // chunk_size * chunk_size
        torch.autograd.backward(loss_of_chunk(first, last, keys, gradients))
        last = first
    return torch.stack(losses).sum()


def train_by_detaching(loss_of_chunk, length, chunk_size):
    edges = [*range(0, length, chunk_size), length]
    keys, total = {}, torch.zeros(())
    for first, last in zip(edges, edges[1:], strict=False):
        with torch.no_grad():
            total += loss_of_chunk(first, last, keys, None).detach()
    gradients = dict(zip(keys, map(torch.zeros_like, keys.values()), strict=True))
    while len(edges) > 1:
        last = edges.pop()
        loss_of_chunk(edges[-1], last, keys, gradients).backward()
    return total


def trained(loss_of_chunk, length, chunk_size, *, forward=torch.no_grad, reverse=True, zeros=torch.zeros_like,
            short=True, graph=False, mean=False, late=False, sums=True, of_backward=False):
    """Train in chunks with a fault."""
    chunks = [(first, min(first + chunk_size, length)) for first in range(0, length, chunk_size)]
    chunks = [each for each in chunks if short or each[1] - each[0] == chunk_size]
    keys, losses, kept = {}, [], []
    with forward():
        for chunk in chunks:
            losses.append(loss_of_chunk(*chunk, keys, None))
    losses = losses if graph else [each.detach() for each in losses]
    gradients = {name: zeros(each) for name, each in keys.items()} if sums else None
    for chunk in reversed(chunks) if reverse else chunks:
        loss = loss_of_chunk(*chunk, keys, gradients)
        kept.append(loss)
        if not late:
            loss.backward()
    if late:
        torch.stack(kept).sum().backward()
    if of_backward:
        losses = kept
    return torch.stack(losses).mean() if mean else sum(losses)


def with_new_sums(loss_of_chunk, length, chunk_size, *, sums=None, keys=None):
    """Train in chunks. What a chunk gets in backward is made for it, or is that of no name."""
    chunks = [(first, min(first + chunk_size, length)) for first in range(0, length, chunk_size)]
    filled, loss = {}, 0.0
    with torch.no_grad():
        for chunk in chunks:
            loss = loss + loss_of_chunk(*chunk, filled, None)
    for chunk in reversed(chunks):
        gradients = {name: torch.zeros_like(each) for name, each in filled.items()} if sums is None else sums
        loss_of_chunk(*chunk, filled if keys is None else keys, gradients).backward()
    return loss


def with_one_tensor(loss_of_chunk, length, chunk_size):
    chunks = [(first, min(first + chunk_size, length)) for first in range(0, length, chunk_size)]
    keys, loss = {}, 0.0
    with torch.no_grad():
        for chunk in chunks:
            loss = loss + loss_of_chunk(*chunk, keys, None)
    gradients = dict.fromkeys(keys, torch.zeros_like(next(iter(keys.values()))))
    for chunk in reversed(chunks):
        loss_of_chunk(*chunk, keys, gradients).backward()
    return loss


def one_after_the_other(loss_of_chunk, length, chunk_size):
    """Forward and backward of a chunk, then the next."""
    keys, loss = {}, 0.0
    for first in range(0, length, chunk_size):
        part = loss_of_chunk(first, min(first + chunk_size, length), keys, None)
        part.backward()
        loss = loss + part.detach()
    return loss


def all_at_once(loss_of_chunk, length, chunk_size):
    return trained(loss_of_chunk, length, length)


ANSWERS = {
    page.check_fit: Answers(
        right=[page.fit, fit_with_the_library, fit_by_lagrange, fit_by_cramer],
        wrong=[
            (fit_at_equal_distances, "at s = 64, 1000, 129: you return"),
            (fit_with_numpy, "you return"),
            (fit_a_line, "4,620·s² + 9,603,368·s + 1,483,841,112 at s = 1, 2, 3: you return"),
            (fit_with_half_of_a, "at s = 1, 2, 3: you return (9240,"),
            (fit_with_the_wrong_slope, "at s = 1, 2, 3: you return (4620,"),
            (fit_through_zero, "at s = 1, 2, 3: you return (4620, 9603368, 0)"),
            (lambda points: page.fit(points)[::-1],
             "you return (1483841112, 9603368, 4620): give a first, c last"),
            (fit_by_polyfit, "expected whole numbers (`//` keeps them)"),
            (lambda points: page.fit(points)[:2], "expected 3 values"),
            (lambda points: page.fit({1: points[1], 2: points[2], 3: points[3]}), "your function raises KeyError"),
            (lambda points: tuple(map(abs, page.fit(points))), "3·s² + -2·s + 10 at s = 1, 2, 3: you return (3, 2,")],
    ),
    page.check_carry: Answers(
        right=[page.carry, carry_by_a_function, carry_by_a_leaf],
        wrong=[
            (partial(carried, store=False),
             "`keys` does not hold the keys of all chunks: write `new` into its tokens first … last − 1"),
            (partial(carried, add=False), "k gets another gradient: what later chunks read of it belongs to it"),
            (partial(carried, give="own"), "k gets another gradient: what later chunks read of it belongs to it"),
            (partial(carried, give="none"), "k gets another gradient: what later chunks read of it belongs to it"),
            (partial(carried, earlier=False), "chunk 1 in backward: another output"),
            (partial(carried, whole=True), "for tokens 0 … 4, expected shape (2, 3, 5, 8)"),
            (partial(carried, detach=False), "`keys` is in a graph after your call: write `new.detach()` into it"),
            (partial(carried, expand=True), "outputs and gradients are right, but a step takes"),
            (lambda new, keys, gradients, first, last: keys[:, :, :last],
             "`keys` does not hold the keys of all chunks"),
            (lambda new, keys, gradients, first, last: carried(new, keys, None, first, last), "k gets no gradient"),
            (lambda new, keys, gradients, first, last: carried(new.detach(), keys, gradients, first, last),
             "your function raises RuntimeError"),
            (new_alone, "for tokens 5 … 11, expected shape (2, 3, 12, 8)"),
            (only_the_own_part, "k gets another gradient: what later chunks read of it belongs to it"),
            (twice_its_own, "the last chunk's k gets another gradient: nothing is added to `gradients` before"),
            (only_of_earlier_ones, "add the whole gradient of the returned keys, the chunk's own part, too"),
            (by_two_hooks, "each k and v gets its gradient, but `gradients` does not hold all of them in the end"),
            (a_broken_hook, "your function raises RuntimeError")],
        saves_nothing=(lambda *given: torch.cat([carried(*given)] * 24)[: len(given[0])],
                       "outputs and gradients are right, but a step takes"),
    ),
    page.check_train_in_chunks: Answers(
        right=[page.train_in_chunks, train_with_a_while, train_by_detaching, trained],
        wrong=[
            (partial(trained, reverse=False), "expected calls for [(0, 16), (16, 32), (32, 48), (48, 64), (64,"),
            (partial(trained, short=False), "you call for [(0, 16), (16, 32), (32, 48), (48, 64), (48, 64)"),
            (partial(trained, sums=False), "in forward, `gradients` is None; in backward it is a dict"),
            (partial(trained, zeros=torch.ones_like), "`gradients` is not zero before the first backward"),
            (partial(trained, zeros=lambda each: each), "`gradients` is not zero before the first backward"),
            (partial(trained, mean=True), "it is the sum divided by 5 chunks"),
            (partial(trained, late=True), "the next chunk runs before this one has gone back"),
            (with_new_sums, "each chunk gets other tensors in `gradients`: make them once"),
            (partial(with_new_sums, sums={}), "`gradients` has 0 names and `keys` has 4: give the dict `keys`"),
            (partial(with_new_sums, keys={}), "`gradients` has 4 names and `keys` has 0: give the dict `keys`"),
            (partial(with_new_sums, sums=0.0), "in backward `gradients` is a dict, you give float"),
            (with_one_tensor, "the names of `gradients` share one tensor: make one for each"),
            (partial(trained, of_backward=True), "your loss has a graph"),
            (partial(trained, forward=torch.enable_grad, graph=True), "your loss has a graph"),
            (one_after_the_other, "you call for [(0, 16), (16, 32), (32, 48), (48, 64), (64, 70)]"),
            (all_at_once, "you call for [(0, 70), (0, 70)]"),
            (lambda loss, length, size: page.train_in_chunks(loss, length, size) / length,
             "it is the sum divided by 70 tokens"),
            (lambda loss, length, size: page.train_in_chunks(loss, length, size).item(), "expected a tensor")],
        saves_nothing=(partial(trained, forward=torch.enable_grad), "loss and gradient are right, but a step takes"),
        same=("first + chunk_size, length → length, first + chunk_size",),  # of min
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
