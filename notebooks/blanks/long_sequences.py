"""What readers build on the page *Long sequences*: a quadratic through three readings, and training in chunks."""

from functools import partial

import torch

from exercises import close, readable
from exercises.asking import ANYTHING, Asked, Complaint
from refimpl import memory
from refimpl.model import GPT, GPTConfig, softmax_attention

from . import blank

HINTS = {
    "fit": [
        "A difference quotient (y₂ − y₁) / (s₂ − s₁) equals a·(s₁ + s₂) + b: c is gone.",
        "Make two of them, of neighbours. Their difference, divided by s₃ − s₁, is a.",
        "Then b = first quotient − a·(s₁ + s₂), and c = y₁ − a·s₁² − b·s₁. `//` keeps whole numbers whole."],
    "carry": [
        "Write `new.detach()` into `keys[:, :, first:last]`. With `gradients=None`, return a view of the keys up to "
        "`last`.",
        "Otherwise, make `every = torch.cat((keys[:, :, :first], new), 2)`. Its gradient arrives in a hook: "
        "`every.register_hook(collect)`.",
        "`collect(gradient)` adds the gradient to `gradients[:, :, :last]` and returns that. Later chunks have added "
        "theirs, so autograd sends on to `new` the sum over all chunks."],
    "train_in_chunks": [
        "First all chunks in order, inside `torch.no_grad()`. Add up their losses.",
        "Between the two loops, make `{name: torch.zeros_like(each) for name, each in keys.items()}`.",
        "Then `reversed(chunks)`: call `loss_of_chunk` with the gradients, and `.backward()` at once, so that each "
        "graph is freed before the next chunk."]}


def fit(points):
    """Return (a, b, c), whole numbers, with bytes = a·s² + b·s + c at three points.

    `points` is {s: bytes}, three lengths in any order and at any distance.
    """
    (s1, y1), (s2, y2), (s3, y3) = points.items()
    first, second = (y2 - y1) // (s2 - s1), (y3 - y2) // (s3 - s2)
    a = (second - first) // (s3 - s1)
    b = first - a * (s1 + s2)
    return a, b, y1 - a * s1 * s1 - b * s1


def carry(new, keys, gradients, first, last):
    """Write a chunk's keys into `keys`, and return all keys so far, (B, H, last, D).

    `new` (B, H, last − first, D) belongs to tokens first … last − 1. `keys`
    (B, H, s, D) belongs to the whole sequence, and to no graph. In forward
    `gradients` is None. In backward it has the shape of `keys`, and holds what later
    chunks have added. Then the whole gradient of the returned keys is added to it,
    and `new` gets the sum that stands there for its own tokens.
    """
    keys[:, :, first:last] = new.detach()
    if gradients is None:
        return keys[:, :, :last]

    def collect(gradient):
        gradients[:, :, :last] += gradient
        return gradients[:, :, :last]

    every = torch.cat((keys[:, :, :first], new), dim=2)
    every.register_hook(collect)
    return every


def train_in_chunks(loss_of_chunk, length, chunk_size):
    """Add a whole sequence's gradient to `.grad`. Return its summed loss, a tensor
    without a graph.

    `loss_of_chunk(first, last, keys, gradients)` returns the summed loss of tokens
    first … last − 1. `keys` is one dict, empty at first: forward fills it with a
    tensor for each name. `gradients` is None in forward. In backward it is one dict
    with the names of `keys`: you make it of zeros, and each chunk adds to it.
    """
    cuts = range(0, length, chunk_size)
    chunks = [(first, min(first + chunk_size, length)) for first in cuts]
    keys, loss = {}, 0.0
    with torch.no_grad():
        for first, last in chunks:
            loss = loss + loss_of_chunk(first, last, keys, None)
    gradients = {name: torch.zeros_like(each) for name, each in keys.items()}
    for first, last in reversed(chunks):
        loss_of_chunk(first, last, keys, gradients).backward()
    return loss


@blank(fit, "the coefficients", (int, int, int))
def check_fit(fit):
    """Check the coefficients of some polynomials, at lengths of several distances."""
    for a, b, c in ((4620, 9_603_368, 1_483_841_112), (0, 7, 3), (5, 0, 0), (3, -2, 10), (12_345_678, 1, 2**40)):
        for lengths in ((1, 2, 3), (256, 384, 512), (64, 1000, 129), (8192, 2048, 4096)):
            said = fit({s: a * s * s + b * s + c for s in lengths})
            if tuple(said) != (a, b, c):
                shown = ", ".join(str(each) for each in said)
                return (f"{a:,}·s² + {b:,}·s + {c:,} at s = {', '.join(map(str, lengths))}: you return ({shown})"
                        f"{_of_coefficients(tuple(said), (a, b, c))}")
    return None


def _of_coefficients(said, expected):
    """Say what wrong coefficients may come from."""
    if said == expected[::-1]:
        return ": give a first, c last"
    return ": expected whole numbers (`//` keeps them)" * any(not float(each).is_integer() for each in said)


def _attend_in_two(carry, B, H, D, cut, s):
    """Return (outputs, gradients of q, k and v, bytes taken) of causal attention in two chunks that are carried."""
    torch.manual_seed(s)
    given = [torch.randn(B, H, s, D).requires_grad_() for _ in range(3)]
    weight, chunks = torch.randn(B, H, s, D), ((0, cut), (cut, s))
    kv, outputs = [torch.full((B, H, s, D), torch.nan) for _ in range(2)], []
    with memory.track(*given, *kv, weight) as t:
        def attend(first, last, sums):
            q, k, v = (each[:, :, first:last] for each in given)
            every = [carry(new, old, sum_, first, last) for new, old, sum_ in zip((k, v), kv, sums, strict=True)]
            if any(old.requires_grad for old in kv):
                return "`keys` is in a graph after your call: write `new.detach()` into it"
            for each in every:
                if each.shape != (B, H, last, D) or each.dtype != k.dtype or not readable(each):
                    return (f"for tokens {first} … {last - 1}, expected shape {(B, H, last, D)} in {k.dtype}: all keys "
                            f"so far; you return {tuple(each.shape)} in {each.dtype}")
            return softmax_attention(q, *every, causal=True)

        with torch.no_grad():
            for chunk in chunks:
                outputs.append(attend(*chunk, (None, None)))
        sums = [torch.zeros_like(each) for each in kv]
        for first, last in reversed(chunks):
            out = attend(first, last, sums)
            if isinstance(out, torch.Tensor):
                Asked((out * weight[:, :, first:last]).sum().backward, ANYTHING)()  # what its hooks raise is said, too
            outputs.append(out)
    wrong = next((each for each in outputs if isinstance(each, str)), None)
    if wrong is None:
        expected = [each.detach().clone().requires_grad_() for each in given]
        out = softmax_attention(*expected, causal=True)
        (out * weight).sum().backward()
        parts = out.split((cut, s - cut), 2)
        wrong = _other(outputs, [*parts, *reversed(parts)], given, expected, kv, sums)
    return wrong, t.peak.total - t.start.total


def _other(outputs, whole, given, expected, kv, sums):
    """Return a sentence if outputs, keys or gradients are other than those of the whole sequence."""
    if any(each.isnan().any() for each in kv):  # as they began
        return "`keys` does not hold the keys of all chunks: write `new` into its tokens first … last − 1"
    for number, (mine, out) in enumerate(zip(outputs, whole, strict=True)):
        if not close(mine.detach(), out.detach()):
            return f"chunk {(0, 1, 1, 0)[number]} in {'forward' if number < 2 else 'backward'}: another output"
    if not all(map(close, kv, [each.detach() for each in expected[1:]])):
        return "`keys` does not hold the keys of all chunks in the end"
    for name, mine, right in zip("qkv", given, expected, strict=True):
        if mine.grad is None:
            return f"{name} gets no gradient"
        cut = whole[0].shape[2]
        if name != "q" and not close(mine.grad[:, :, cut:], right.grad[:, :, cut:]):
            return (f"the last chunk's {name} gets another gradient: nothing is added to `gradients` before, so it is "
                    "the returned keys' own, once")
        if not close(mine.grad, right.grad):
            later = ": what later chunks read of it belongs to it, too" * (name != "q")
            return f"the first chunk's {name} gets another gradient{later}"
    if not all(map(close, sums, [each.grad for each in expected[1:]])):
        return ("each k and v gets its gradient, but `gradients` does not hold all of them in the end: add the whole "
                "gradient of the returned keys, the chunk's own part, too")
    return None


@blank(carry, "parity and bytes", torch.Tensor)
def check_carry(carry):
    """Check attention in two chunks: outputs, gradients, what stands in `keys` and `gradients`, and the bytes."""
    for B, H, D, cut, s in ((2, 3, 8, 5, 12), (1, 2, 16, 3, 4), (2, 2, 8, 96, 128)):
        wrong, took = _attend_in_two(carry, B, H, D, cut, s)
        if wrong:
            return wrong
        _, ours = _attend_in_two(globals()["carry"], B, H, D, cut, s)
        if took > 1.25 * ours + 1024:
            return f"outputs and gradients are right, but a step takes {took:,} bytes; {ours:,} are enough"
    return None


CONFIG = GPTConfig(vocab_size=96, context_length=80, layers=2, hidden=32, heads=2)


class _Backwards:
    """Looks at what the chunks of a backward are given. Raises Complaint where that leaves gradients incomplete."""

    def __init__(self):
        self.gradients, self.waits = None, False

    def look(self, keys, gradients):
        """Look at the two dicts of the next chunk."""
        if not isinstance(gradients, dict):
            raise Complaint(f"in backward `gradients` is a dict, you give {type(gradients).__name__}")
        if set(gradients) != set(keys):
            raise Complaint(f"in backward `gradients` has {len(gradients)} names and `keys` has {len(keys)}: give the "
                            "dict `keys` that forward has filled, and a tensor of zeros for each of its names")
        places = [each.untyped_storage().data_ptr() for each in gradients.values()]
        if self.gradients is None:
            if any(each.any() for each in gradients.values()):
                raise Complaint("`gradients` is not zero before the first backward")
            if len(set(places)) < len(places):
                raise Complaint("the names of `gradients` share one tensor: make one for each")
            self.gradients = list(gradients.values())  # held, so that no other takes their place
        elif places != [each.untyped_storage().data_ptr() for each in self.gradients]:
            raise Complaint("each chunk gets other tensors in `gradients`: make them once, since they carry what later "
                            "chunks add")
        if self.waits:
            raise Complaint("the next chunk runs before this one has gone back: call `.backward()` on each loss at "
                            "once")

    def wait_for(self, loss):
        """Note that a chunk's loss has not gone back yet, and when it does."""
        if loss.requires_grad:
            self.waits = True
            loss.register_hook(self._back)

    def _back(self, gradient):
        self.waits = False


def _chunk_losses(model, tokens, targets, calls):
    """Return a `loss_of_chunk` of a GPT, with our `carry`. It notes in `calls` what it is called with."""
    backwards = _Backwards()

    def loss_of_chunk(first, last, keys, gradients):
        calls.append((first, last, gradients is not None, torch.is_grad_enabled()))
        if gradients is not None:
            backwards.look(keys, gradients)

        def attend(q, k, v, number, **options):
            every = []
            for name, new in ((f"K {number}", k), (f"V {number}", v)):
                if name not in keys:
                    keys[name] = new.new_zeros(*new.shape[:2], tokens.shape[1], new.shape[3])
                every.append(carry(new, keys[name], gradients and gradients[name], first, last))
            return softmax_attention(q, *every, causal=True)

        before = [block.attention.attention for block in model.blocks]
        for number, block in enumerate(model.blocks):
            block.attention.attention = partial(attend, number=number)
        try:
            loss = model(tokens[:, first:last], targets[:, first:last], offset=first, reduction="sum")
            if gradients is not None:
                backwards.wait_for(loss)
            return loss
        finally:
            for block, attention in zip(model.blocks, before, strict=True):
                block.attention.attention = attention

    return loss_of_chunk


def _trained(train_in_chunks, chunk_size):
    """Return (what is returned, gradients, calls, bytes taken, model, batch) of a step in chunks."""
    torch.manual_seed(chunk_size)
    model, (tokens, targets) = GPT(CONFIG), torch.randint(0, 96, (2, 2, 70))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    calls = []
    with memory.track(model, tokens, targets) as t:
        loss = train_in_chunks(_chunk_losses(model, tokens, targets, calls), 70, chunk_size)
    found = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return loss, found, calls, t.peak.total - t.start.total, model, (tokens, targets)


@blank(train_in_chunks, "parity and bytes", torch.Tensor)
def check_train_in_chunks(answer):
    """Check the loss, the gradient, the order of the chunks, and the bytes."""
    for chunk_size in (16, 35, 100):
        loss, found, calls, took, model, batch = _trained(answer, chunk_size)
        *_, right_calls, ours, _, _ = _trained(train_in_chunks, chunk_size)
        chunks = [each[:2] for each in right_calls]
        if [each[:2] for each in calls] != chunks:
            return (f"70 tokens in chunks of {chunk_size}: expected calls for {chunks}, you call for "
                    f"{[each[:2] for each in calls]}")
        if [each[2] for each in calls] != [each[2] for each in right_calls]:
            return "in forward, `gradients` is None; in backward it is a dict"
        if loss.requires_grad:
            return "your loss has a graph, which keeps the activations of every chunk"
        model.zero_grad()
        expected = model(*batch, reduction="sum")
        expected.backward()
        if not close(loss.reshape(()), expected.detach()):
            n, said = len(chunks) // 2, loss.sum().item()
            mean = next((f": it is the sum divided by {number} {of}" for number, of in ((n, "chunks"), (70, "tokens"))
                         if abs(said - expected / number) < 1e-4 * said), "")
            return f"the loss of {n} chunks is {expected.item():.5g}, you return {said:.5g}{mean}"
        for (name, parameter), mine in zip(model.named_parameters(), found, strict=True):
            if mine is None or not close(mine, parameter.grad):
                return f"the loss is right, but {name} has another gradient"
        if took > 1.1 * ours:
            return f"loss and gradient are right, but a step takes {took:,} bytes above the start; {ours:,} are enough"
    return None
