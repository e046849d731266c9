"""What the reader builds on the page *While it trains*: bytes known by name, what grows, a batch in parts that fit."""

from types import SimpleNamespace

import torch

from exercises import readable
from exercises.asking import ANYTHING, Complaint
from refimpl import memory
from refimpl.model import GPT, GPTConfig

from . import blank

HINTS = {
    "known_bytes": [
        "`optimizer.state.values()` are dicts, one a parameter. Their values are tensors and, in some optimizers, "
        "numbers: `isinstance(value, torch.Tensor)` tells them apart.",
        "Keep one set of storages for all three categories: `tensor.untyped_storage().data_ptr()` is an address. What "
        "is in the set has been counted.",
        "A parameter without a gradient has None. `tensor.device == device` leaves out what lies elsewhere."],
    "grows": [
        "`last = ends[-3 * size:]` are the steps that count. Cut `last` into three windows.",
        "A window is above the one before if `min(later) >= max(earlier)` and `min(later) - min(earlier) >= least`.",
        "If both neighbours are so, there are `3 * size - 1` steps between the first and the last of `last`."],
    "backward_in_parts": [
        "One row's scores take `4 * model.config.heads * length ** 2` bytes. So `room //` that many rows fit, or 1 row "
        "if that is 0.",
        "`rows.split(size)` gives the parts; the last one may have fewer rows.",
        "`model` returns a part's mean. `loss * len(part) / len(rows)` is the part's share of the mean over all rows. "
        "Call `backward` for each part, before the next one runs."]}


def known_bytes(model, optimizer):
    """Return {"parameters": …, "gradients": …, "optimizer state": …}, in bytes.

    Storages count, each one once, in the first category that has a tensor on it. What
    does not lie on the device of the model's first parameter does not count.
    """
    tensors = {
        "parameters": list(model.parameters()),
        "gradients": [each.grad for each in model.parameters()],
        "optimizer state": [x for each in optimizer.state.values() for x in each.values()]}
    device, counted, found = next(model.parameters()).device, set(), {}
    for name, those in tensors.items():
        found[name] = 0
        for tensor in those:
            if isinstance(tensor, torch.Tensor) and tensor.device == device:
                storage = tensor.untyped_storage()
                found[name] += storage.nbytes() * (storage.data_ptr() not in counted)
                counted.add(storage.data_ptr())
    return found


def _tied():
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(40, 30), torch.nn.Linear(30, 30))
    model[1].weight = model[0].weight
    return model


def _flat(numbers):
    """Return a model whose two parameters, and the gradients of both, are views of one tensor each."""
    whole, gradients = torch.randn(numbers), torch.randn(numbers)
    model = torch.nn.ParameterList([whole[:50], whole[50:]])
    for part, gradient in zip(model, (gradients[:50], gradients[50:]), strict=True):
        part.grad = gradient
    return model


def _with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def _stepped(model, kind, **options):
    optimizer = kind(_with_gradients(model).parameters(), lr=1e-3, **options)
    optimizer.step()
    return optimizer


def _known():
    """Return {what they are: (model, optimizer, bytes of parameters, of gradients, of states)}."""
    linear, again, tied, flat = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30), _tied(), _flat(170)
    frozen, elsewhere = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    one = 4 * (40 * 30 + 30)
    two = 4 * (40 * 30 + 30 + 30 + 30 * 30 + 30)
    momentum = _stepped(linear, torch.optim.SGD, momentum=0.9)
    of_tied = _stepped(tied, torch.optim.Adam)
    dropped = _stepped(again, torch.optim.SGD, momentum=0.9)
    dropped.zero_grad()
    frozen.weight.requires_grad_(False)
    frozen.bias.grad = torch.ones(30)
    other = SimpleNamespace(state={elsewhere.weight: {
        "step": 3, "average": torch.ones(7), "step count": torch.ones(1, device="meta"),
        "as a whole": torch.ones(50)[:9], "none": None}})
    return {
        "SGD with momentum": (linear, momentum, one, one, one),
        "SGD with momentum, after zero_grad": (again, dropped, one, 0, one),
        "a weight that two layers share, in Adam": (tied, of_tied, two, two, 2 * two + 4 * 5),
        "parameters that are views of one tensor, and their gradients of another": (
            flat, SimpleNamespace(state={}), 4 * 170, 4 * 170, 0),
        "a bias alone with a gradient, no state": (frozen, SimpleNamespace(state={}), one, 4 * 30, 0),
        "a state with a slice, numbers and a tensor on another device": (elsewhere, other, one, 0, 4 * (7 + 50)),
        "a model and an optimizer whose state is a parameter": (
            linear, SimpleNamespace(state={linear.weight: {"copy": linear.weight.detach()}}), one, one, 0)}


@blank(known_bytes, "bytes", dict)
def check_known_bytes(known_bytes):
    """Check `known_bytes` on models and optimizers that share storages, and on states that are no tensors."""
    for what, (model, optimizer, *right) in _known().items():
        found, expected = known_bytes(model, optimizer), dict(zip(
            ("parameters", "gradients", "optimizer state"), right, strict=True))
        if set(found) != set(expected):
            return f"expected the keys {', '.join(expected)}; you return {', '.join(map(str, found)) or 'none'}"
        for name, nbytes in expected.items():
            if found[name] != nbytes:
                return f"{what}: you say {_said(found[name])} bytes of {name}; the storages have {nbytes:,}"
    return None


def _said(value):
    return f"{value:,}" if isinstance(value, (int, float)) else repr(value)


def grows(ends, size=3, least=1):
    """Return by how many bytes a step `ends` grows, a whole number, 0 if it does not.

    `ends`: the bytes at the end of each step. The last 3 × `size` are three windows. In
    a window that is above the one before, each step has at least as much as every step
    of that one, and the window's minimum is at least `least` bytes more. `ends` grows if
    two windows are above the one before: from the first step to the last of the three.
    """
    last = ends[-3 * size:]
    windows = [last[i * size:(i + 1) * size] for i in range(3)]
    if len(last) < 3 * size:
        return 0
    for before, now in (windows[:2], windows[1:]):
        if min(now) < max(before) or min(now) - min(before) < least:
            return 0
    return round((last[-1] - last[0]) / (3 * size - 1))


MIB = 2**20
ENDS = {
    "a step adds 8 MiB": ([(40 + 8 * step) * MIB for step in range(9)], 3, MIB),
    "a step adds 100 bytes": ([5000 + 100 * step for step in range(9)], 3, 1),
    "a step adds 100 bytes, and a window has to add 301": ([5000 + 100 * step for step in range(9)], 3, 301),
    "a step adds 100 bytes, and a window has to add 300": ([5000 + 100 * step for step in range(9)], 3, 300),
    "nothing grows": ([7 * MIB] * 12, 3, 1),
    "two windows are as high": ([9, 9, 9, 9, 9, 9, 12, 12, 12], 3, 1),
    "the last window is as high as the one before": ([6, 6, 6, 9, 9, 9, 9, 9, 9], 3, 1),
    "windows of any order": ([300, 100, 200, 400, 300, 500, 600, 500, 700], 3, 1),
    "minima 200 apart, maxima 260, and a window has to add 250": (
        [100, 150, 200, 300, 400, 460, 500, 600, 720], 3, 250),
    "the second window has 1 byte more": ([1, 2, 2, 2, 2, 10, 10, 10, 17], 3, 1),
    "one step of the middle falls below": ([300, 100, 200, 400, 290, 500, 600, 500, 700], 3, 1),
    "one step of the last window falls below": ([300, 100, 200, 400, 300, 500, 600, 490, 700], 3, 1),
    "a cache that is emptied each four steps": ([10, 20, 30, 40] * 3, 3, 1),
    "it grew, and stays now": ([10, 20, 30, 40, 50, 60, 70, 80, 90, 90, 90, 90, 90, 90, 90], 3, 1),
    "it grows after twenty steps that did not": ([50] * 20 + [100 * step for step in range(1, 10)], 3, 1),
    "only eight steps are known": ([100 * step for step in range(8)], 3, 1),
    "no step is known": ([], 3, 1),
    "windows of two": ([7, 1, 1, 2, 2, 4, 5], 2, 1),
    "windows of four": ([100 * step for step in range(12)], 4, 1),
    "it shrinks": ([900 - 100 * step for step in range(9)], 3, 1)}
RATES = 8 * MIB, 100, 0, 100, 0, 0, 0, 50, 0, 2, 0, 0, 0, 0, 100, 0, 0, 1, 100, 0


@blank(grows, "bytes", float)
def check_grows(grows):
    """Check `grows` on runs that grow, that only seem to, and in windows of other sizes."""
    for (what, (ends, size, least)), right in zip(ENDS.items(), RATES, strict=True):
        said = grows(list(ends), *([] if (size, least) == (3, 1) else [size, least]))
        if said != right:
            return (f"{what}: {ends[-12:]}, in windows of {size}, least {least:,}: you say {said:,} bytes a step; it "
                    f"is {right:,}")
    return None


def backward_in_parts(model, rows, room):
    """Call backward on parts of `rows` (B, T + 1), and as few parts as fit.

    The gradients are those of `model(rows[:, :-1], rows[:, 1:])`, the mean loss over
    all rows, which have T tokens and their targets. A layer's scores of a part,
    4 × heads × rows × T² bytes, take at most `room`; a part has one row at least.
    """
    length = rows.shape[1] - 1
    size = max(1, room // (4 * model.config.heads * length**2))
    for part in rows.split(size):
        loss = model(part[:, :-1], part[:, 1:])
        (loss * len(part) / len(rows)).backward()


class _Watched(torch.nn.Module):
    """A model that notes how many rows it is called on."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.parts = model, model.config, []

    def forward(self, *tensors, **options):
        """Note the rows, and call the model."""
        self.parts.append(len(tensors[0]))
        return self.model(*tensors, **options)


CONFIG = GPTConfig(50, 64, layers=2, hidden=16, heads=4)
BATCHES = (  # rows, tokens, room for scores
    (7, 40, 3 * 16 * 40**2), (6, 64, 100), (5, 12, 2**30), (8, 33, 4 * 16 * 33**2), (10, 8, 5 * 16 * 8**2))


@blank(backward_in_parts, "parity and bytes", ANYTHING)
def check_backward_in_parts(backward_in_parts):
    """Compare the gradients with those of the whole batch, the parts with those that fit, the peak with ours."""
    for many, length, room in BATCHES:
        torch.manual_seed(many)
        model, rows = _Watched(GPT(CONFIG)), torch.randint(50, (many, length + 1))
        what = f"{many} rows of {length}, room for {room:,} bytes of scores"
        model(rows[:, :-1], rows[:, 1:]).backward()
        right = {name: each.grad.clone() for name, each in model.named_parameters()}
        model.zero_grad()
        model.parts.clear()
        backward_in_parts(model, rows, room)
        if wrong := _wrong_gradients(model, right) or _wrong_parts(model.parts, many, length, room):
            return f"{what}: {wrong}"
    ours, theirs = _peak(globals()["backward_in_parts"]), _peak(backward_in_parts)
    return None if theirs <= 1.05 * ours else (f"the gradients are right, but the peak is {theirs:,} bytes; ours is "
                                               f"{ours:,}: a part's graph has to go before the next one is made")


def _wrong_gradients(model, right):
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            return f"{name.removeprefix('model.')} has no gradient; expected those of the mean loss"
        if not readable(parameter.grad):
            raise Complaint(f"the gradient of {name.removeprefix('model.')} has no storage")
        if not torch.allclose(parameter.grad, right[name], rtol=1e-3, atol=1e-3 * right[name].abs().max().item()):
            share = (parameter.grad.norm() / right[name].norm()).item()
            return (f"the gradient of {name.removeprefix('model.')} is not that of the whole batch: its norm is "
                    f"{share:.3f} times as large")
    return None


def _wrong_parts(parts, many, length, room):
    row = 4 * CONFIG.heads * length**2
    fits = max(1, room // row)
    if max(parts) > fits:
        return f"a part has {max(parts)} rows, whose scores take {max(parts) * row:,} bytes; {fits} may be in a part"
    if len(parts) > -(-many // fits):
        return f"right, but in {len(parts)} parts; {-(-many // fits)} are enough, since {fits} rows fit"
    return None


def _peak(backward_in_parts):
    torch.manual_seed(0)
    model, rows = GPT(CONFIG), torch.randint(50, (8, 65))
    with memory.track(model, rows) as t:
        backward_in_parts(model, rows, 2 * 4 * 4 * 64**2)
    return t.peak.total
