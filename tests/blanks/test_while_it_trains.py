"""What readers build in place of ours is told right from wrong."""

import itertools
import re

import torch
from exercises_kit import Answers, graded

from blanks import while_it_trains as page

NAMES = "parameters", "gradients", "optimizer state"

# --- known_bytes -----------------------------------------------------------------------------------------------------


def tensors_of(model, optimizer):
    """Return {category: tensors, whatever they are}."""
    return dict(zip(NAMES, (list(model.parameters()), [each.grad for each in model.parameters()],
                            [x for each in optimizer.state.values() for x in each.values()]), strict=True))


def by_storages(model, optimizer):
    seen, device = {}, next(model.parameters()).device
    for name, tensors in tensors_of(model, optimizer).items():
        for tensor in filter(torch.is_tensor, tensors):
            if tensor.device == device:
                seen.setdefault(tensor.untyped_storage()._cdata, (name, tensor.untyped_storage().nbytes()))
    return {each: sum(nbytes for name, nbytes in seen.values() if name == each) for each in NAMES}


def one_after_the_other(model, optimizer):
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [x for state in optimizer.state.values() for x in state.values()
              if torch.is_tensor(x) and x.device == parameters[0].device]
    counted, totals = set(), []
    for those in (parameters, gradients, states):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in those}
        totals.append(float(sum(storages[each] for each in storages if each not in counted)))
        counted |= set(storages)
    return dict(zip(NAMES, totals, strict=True))


def known_with(model, optimizer, *, key=lambda t: t.untyped_storage().data_ptr(),
               size=lambda t: t.untyped_storage().nbytes(), apart=False, devices=True):
    """Return what `known_bytes` does, with one fault."""
    counted, found, device = set(), {}, next(model.parameters()).device
    for name, tensors in tensors_of(model, optimizer).items():
        counted, found[name] = set() if apart else counted, 0
        for tensor in filter(torch.is_tensor, tensors):
            if (tensor.device == device or not devices) and key(tensor) not in counted:
                counted.add(key(tensor))
                found[name] += size(tensor)
    return found


def faulty(**parts):
    return lambda model, optimizer: known_with(model, optimizer, **parts)


def by_arithmetic(model, optimizer):
    """Adam's 4 + 4 + 8."""
    nbytes = 4 * sum(each.numel() for each in model.parameters())
    return dict(zip(NAMES, (nbytes, nbytes, 2 * nbytes), strict=True))


def all_have_gradients(model, optimizer):
    return by_storages(model, optimizer) | {"gradients": sum(each.grad.nbytes for each in model.parameters())}


# --- grows -----------------------------------------------------------------------------------------------------------


def step_by_step(ends, size=3, least=1):
    if len(ends) < 3 * size:
        return 0
    first, second, third = (ends[len(ends) - n * size:][:size] for n in (3, 2, 1))
    above = all(later >= earlier for a, b in ((first, second), (second, third)) for earlier in a for later in b)
    enough = min(second) >= min(first) + least and min(third) >= min(second) + least
    return int(round((third[-1] - first[0]) / (3 * size - 1))) if above and enough else 0


def by_tensors(ends, size=3, least=1):
    if len(ends) < 3 * size:
        return 0
    windows = torch.tensor(ends[-3 * size:]).view(3, size)
    low, high = windows.min(1).values, windows.max(1).values
    good = (low[1:] >= high[:-1]).all() and (low[1:] - low[:-1] >= least).all()
    return round((windows[2, -1] - windows[0, 0]).item() / (3 * size - 1)) if good else 0


def grows_with(ends, size=3, least=1, *, part=lambda ends, n: ends[-n:], above=lambda a, b: min(b) >= max(a),
               more=lambda a, b: min(b) - min(a), steps=lambda n: n - 1, enough=True):
    """Return what `grows` does, with one fault."""
    last = part(ends, 3 * size)
    if enough and len(last) < 3 * size:
        return 0
    windows = [last[i * size:(i + 1) * size] for i in range(3)]
    for a, b in itertools.pairwise(windows):
        if not a or not b or not above(a, b) or more(a, b) < least:
            return 0
    return round((last[-1] - last[0]) / steps(3 * size))


def growing(**parts):
    return lambda ends, size=3, least=1: grows_with(ends, size, least, **parts)


# --- backward_in_parts -----------------------------------------------------------------------------------------------


def row_bytes(model, rows):
    return 4 * model.config.heads * (rows.shape[1] - 1) ** 2


def of_sums(model, rows, room):
    """Adds sums, and divides by all targets."""
    size = max(room // row_bytes(model, rows), 1)
    for at in range(0, len(rows), size):
        part = rows[at:at + size]
        (model(part[:, :-1], part[:, 1:], reduction="sum") / rows[:, 1:].numel()).backward()


def of_even_parts(model, rows, room):
    size = max(1, int(room / row_bytes(model, rows)))
    for part in rows.tensor_split(-(-len(rows) // size)):
        part_of_all = part.shape[0] / rows.shape[0]
        model(part[:, :-1], part[:, 1:]).backward(torch.tensor(part_of_all))


def parts_with(model, rows, room, *, size=lambda model, rows, room: max(1, room // row_bytes(model, rows)),
               share=lambda part, rows, parts: len(part) / len(rows), tokens=lambda part: (part[:, :-1], part[:, 1:])):
    """Do what `backward_in_parts` does, with one fault."""
    parts = rows.split(size(model, rows, room))
    for part in parts:
        (model(*tokens(part)) * share(part, rows, parts)).backward()


def in_parts(**parts):
    return lambda model, rows, room: parts_with(model, rows, room, **parts)


def summed(model, rows, room):
    """All losses, then one backward: each loss keeps its graph till then."""
    size = max(1, room // row_bytes(model, rows))
    sum(model(part[:, :-1], part[:, 1:]) * len(part) / len(rows) for part in rows.split(size)).backward()


def the_first_part(model, rows, room):
    page.backward_in_parts(model, rows[:max(1, room // row_bytes(model, rows))], room)


ANSWERS = {
    page.check_known_bytes: Answers(
        right=[page.known_bytes, by_storages, one_after_the_other],
        wrong=[
            (faulty(key=id), "parameters that are views of one tensor, and their gradients of another: you say 1,360"),
            (faulty(size=lambda t: t.nbytes), "and their gradients of another: you say 200 bytes of parameters"),
            (faulty(size=lambda t: t.numel()), "SGD with momentum: you say 1,230 bytes of parameters"),
            (faulty(apart=True), "whose state is a parameter: you say 4,800 bytes of optimizer state"),
            (faulty(devices=False), "and a tensor on another device: you say 232 bytes of optimizer state"),
            (by_arithmetic, "SGD with momentum: you say 9,840 bytes of optimizer state; the storages have 4,920"),
            (all_have_gradients, "your function raises AttributeError"),
            (lambda model, optimizer: dict.fromkeys(NAMES, 0), "you say 0 bytes of parameters"),
            (lambda model, optimizer: by_storages(model, optimizer) | {"buffers": 0}, "you return parameters, gradien"),
            (lambda model, optimizer: sum(by_storages(model, optimizer).values()), "expected a dict, you return 14760"),
            (lambda model, optimizer: dict.fromkeys(NAMES), "you say None bytes of parameters")],
    ),
    page.check_grows: Answers(
        right=[page.grows, step_by_step, by_tensors],
        wrong=[
            (lambda ends, size=3, least=1: ends[-1] > ends[0] if ends else 0, "expected a number, you return True"),
            (growing(above=lambda a, b: True), "one step of the middle falls below"),
            (growing(above=lambda a, b: min(b) > max(a)), "windows of any order"),
            (growing(above=lambda a, b: max(b) >= max(a)), "one step of the middle falls below"),
            (growing(more=lambda a, b: 2**30), "and a window has to add 301"),
            (growing(more=lambda a, b: min(b) - min(a) - 1), "and a window has to add 300"),
            (growing(more=lambda a, b: max(b) - max(a)), "minima 200 apart, maxima 260"),
            (growing(more=lambda a, b: min(b) - max(a)), "a step adds 100 bytes, and a window has to add 300"),
            (growing(steps=lambda n: n), "a step adds 8 MiB"),
            (growing(part=lambda ends, n: ends[:n]), "it grew, and stays now"),
            (growing(enough=False), "only eight steps are known"),
            (lambda ends, size=3, least=1: grows_with(ends, 3, least), "windows of two: [7, 1, 1, 2, 2, 4, 5]"),
            (lambda ends, size=3, least=1: (ends[-1] - ends[0]) // max(1, len(ends) - 1) if ends else 0,
             "and a window has to add 301")],
    ),
    page.check_backward_in_parts: Answers(
        right=[page.backward_in_parts, of_sums, of_even_parts],
        wrong=[
            (in_parts(share=lambda part, rows, parts: 1), "that of the whole batch: its norm is 3."),
            (in_parts(share=lambda part, rows, parts: 1 / len(parts)), "is not that of the whole batch"),
            (in_parts(share=lambda part, rows, parts: 1 / len(rows)), "is not that of the whole batch"),
            (in_parts(tokens=lambda part: (part[:, :-1], part[:, :-1])), "is not that of the whole batch"),
            (in_parts(size=lambda model, rows, room: 1), "right, but in 7 parts; 3 are enough, since 3 rows fit"),
            (in_parts(size=lambda model, rows, room: len(rows)), "a part has 7 rows, whose scores take 179,200 bytes"),
            (in_parts(size=lambda model, rows, room: room // row_bytes(model, rows)), "your function raises"),
            (in_parts(size=lambda model, rows, room: max(1, room // (4 * (rows.shape[1] - 1) ** 2))),
             "a part has 7 rows"),
            (in_parts(size=lambda model, rows, room: max(1, room // (row_bytes(model, rows) // 4))), "a part has 7"),
            (in_parts(size=lambda model, rows, room: max(1, room // (4 * model.config.heads * rows.shape[1] ** 2))),
             "7 rows of 40, room for 76,800 bytes of scores: right, but in 4 parts; 3 are enough, since 3 rows fit"),
            (the_first_part, "is not that of the whole batch"),
            (lambda model, rows, room: None, re.compile("has no gradient|not answered yet"))],
        saves_nothing=(summed, "the gradients are right, but the peak is"),
        same=("1, room // (4 * model.config.heads * length**2) → room // (4 * model.config.heads * length**2), 1",),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_the_rule_is_that_of_the_guard():
    from refimpl.guard.growth import FIRST, Series

    for (ends, size, least), rate in zip(page.ENDS.values(), page.RATES, strict=True):
        series, found = Series(least), []
        for step, nbytes in enumerate([0] * FIRST + ends[-3 * size:], 1):
            found.append(series.add(step, nbytes))
        assert size != 3 or bool(found[-1]) == bool(rate)


def test_known_bytes_are_those_of_the_guard():
    from refimpl.guard.known_bytes import KnownBytes

    model = torch.nn.Linear(40, 30)
    optimizer = page._stepped(model, torch.optim.AdamW)
    known = KnownBytes()
    known.models.add(model)
    known._modules = [lambda: model]
    known.optimizers.add(optimizer)
    assert {name: known.read(-1)[name] for name in NAMES} == page.known_bytes(model, optimizer)
