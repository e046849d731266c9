"""Exercises of the page *Smaller activations*."""

import tracemalloc

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from refimpl import memory
from refimpl.activations import compress_activations
from refimpl.model import GPT, GPTConfig

from . import SCALAR, close, exercise, readable
from .asking import Complaint, fault

HINTS = {
    "first": [
        "`pack` may return anything, such as a tuple. Give a tensor back as it is unless its dtype is torch.bool.",
        "Pad the flat mask with False to a multiple of 8 and view it as (bytes, 8). Shift by 0, 1 … 7 bits, and sum.",
        "`packed[:, None] >> torch.arange(8) & 1` gives the bits back. Keep the shape in the tuple: `unpack` takes the "
        "first `shape.numel()` bits, as booleans, in that shape."],
    "second": [
        "4 bits are 16 codes, so a step is (max − min) / 15. A group of equal values has a step of 0: divide by "
        "another number there.",
        "Fill the last group up with its own last value. Then all groups are rows of one matrix, and `aminmax(dim=1)` "
        "gives the least and the largest value of each.",
        "With an even number of codes, `codes[::2] | codes[1::2] << 4` has two in a byte. `packed & 15` and "
        "`packed >> 4` give them back; `torch.stack((low, high), 1).flatten()` has them in order again."],
    "third": [
        "A tensor in a list keeps its whole storage. A norm is one number.",
        "`x.detach()` shares the storage of x, so it keeps as much. `x.detach().norm().item()` keeps nothing of x.",
        "Write the hooks of `saves_nothing` anew. Each appends `….detach().norm().item()` to a list. Remove them after "
        "the forward, and give the model no attribute."]}

CONFIG = GPTConfig(vocab_size=256, context_length=64, layers=3, hidden=64, heads=4)


def _loss(x, ids, weights):
    """Return a loss for which autograd saves integers, floats, and a mask that lies in memory column by column."""
    y = F.embedding(ids, x).sin().t()
    return (y.masked_fill(y > 0, 0) * weights).sum()


def watched(pack, unpack):
    """Return the two hooks as one context, which complains if a tensor comes back with another shape or dtype."""
    def packed(tensor):
        return pack(tensor), tuple(tensor.shape), tensor.dtype

    def unpacked(kept):
        tensor, shape, dtype = unpack(kept[0]), *kept[1:]
        if wrong := fault(tensor, torch.Tensor):
            raise Complaint(f"unpack: {wrong}")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not readable(tensor):
            raise Complaint(f"pack was given a tensor of shape {shape} in {dtype}, and unpack returns one of shape "
                            f"{tuple(tensor.shape)} in {tensor.dtype}")
        return tensor

    return saved_tensors_hooks(packed, unpacked)


@exercise("parity and bytes", (callable, callable))
def first(hooks):
    """Grade `hooks()`, which returns (pack, unpack) for `saved_tensors_hooks` that keep a boolean tensor in one bit an
    element."""
    for rows, width in ((256, 384), (37, 111), (1, 5)):
        torch.manual_seed(rows)
        x, ids = torch.randn(rows, width, requires_grad=True), torch.randint(rows, (rows,))
        given, n = (x, ids, torch.randn(width, rows)), rows * width
        with memory.track(*given) as t:
            expected = _loss(*given)
        whole = t.now["activations"]
        with memory.track(*given) as t, watched(*hooks()):
            loss = _loss(*given)
        limit = whole - n + -(-n // 8) + 64
        if not torch.equal(*(torch.autograd.grad(each, x)[0] for each in (loss, expected))):
            return f"a mask of {n:,} elements, a float tensor and one of integers: the gradient is another"
        if t.now["activations"] > limit:
            return (f"the gradient is right, but {t.now['activations']:,} bytes are kept of {whole:,}: a mask of {n:,} "
                    f"elements in bits leaves {limit - 64:,}")
        if _in_python(hooks, given) > n // 4 + 8192:
            return "the gradient is right, but the mask is kept outside of tensors: as a list, or in numpy"
    return None


def _in_python(hooks, given):
    """Return the bytes that Python and numpy hold when a forward has run.

    It runs without dispatch modes: of each operation they leave Python objects, which nobody collects before the bytes
    are read.
    """
    with _disable_current_modes():
        tracemalloc.start()
        try:
            with saved_tensors_hooks(*hooks()):
                loss = _loss(*given)
            return tracemalloc.get_traced_memory()[0] * bool(loss.requires_grad)
        finally:
            tracemalloc.stop()


def _values(n, group, seed):
    """Return n values, the first group all the same, each other one with a range and a place of its own; those of the
    third are tiny."""
    torch.manual_seed(seed)
    x = torch.randn(n)
    for i, part in enumerate(x.split(group)[1:], 1):
        part.mul_(10.0 ** (i % 3)).add_(30 * seed * (-1) ** i)
    x[:group] = 0.5 + seed
    x[2 * group : 3 * group] *= 1e-9
    return x


@exercise("rounding and bytes", ([torch.Tensor], callable))
def second(code):
    """Grade `code(x, group)`, which returns (tensors, decode) for fp32 values (n,).

    `decode(*tensors)` differs from x by at most half a quantization step, (max − min) / 15 of a group. The tensors
    take ⌈n/2⌉ + 8·⌈n/group⌉ bytes.
    """
    for n, group in ((1024, 64), (1000, 128), (77, 7), (5, 8)):
        x, other = (_values(n, group, seed) for seed in (1, 2))
        tensors, decode = code(x.clone(), group)
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        limit = -(-n // 2) + 8 * -(-n // group)
        if sum(storages.values()) > limit:
            return f"{n} values in groups of {group} take {sum(storages.values()):,} bytes: expected {limit:,}"
        if not all(map(readable, tensors)):
            return "a tensor has no bytes: its storage was freed"
        for values, found in ((x, decode(*tensors)), (other, decode(*code(other.clone(), group)[0]))):
            if wrong := _far(values, found, group):
                return wrong + " when decode gets the tensors of other values: it may use its arguments alone" * (
                    values is other)
    return None


def _far(x, found, group):
    """Return a sentence if decoded values are further from x than half a step, else None."""
    if wrong := fault(found, torch.Tensor):
        return f"decode: {wrong}"
    if found.shape != x.shape or found.dtype != x.dtype or not readable(found):
        return f"decode: expected {len(x)} values in {x.dtype}, of shape ({len(x)},), you return {_like(found)}"
    for i, (part, back) in enumerate(zip(x.split(group), found.split(group), strict=True)):
        step, off = ((part.max() - part.min()) / 15).item(), (part - back).abs().max().item()
        if not off <= 0.502 * step + 1e-6 * part.abs().max().item():  # NaN is not
            far = (f"{off / step:.3f} of a step; 0.5 is the most. Its values go from {part.min().item():.3g} to "
                   f"{part.max().item():.3g}") if step else f"{off:.2g}, and its values are all equal"
            return f"group {i} of {len(x)} values in groups of {group} is off by {far}"
    return None


def _like(tensor):
    return f"a tensor of shape {tuple(tensor.shape)} in {tensor.dtype}"


def saves_nothing(model, tokens):
    """Run a forward with activations compressed to 8 bits. Returns (loss, norms of some activations)."""
    outputs = []
    handles = [block.register_forward_hook(lambda block, args, x: outputs.append(x)) for block in model.blocks]
    handles += [block.mlp.register_forward_hook(lambda mlp, args, x: outputs.append(args[0])) for block in model.blocks]
    with compress_activations(model, smallest=0):
        loss = model(tokens, tokens)
    for handle in handles:
        handle.remove()
    model.outputs = outputs
    return loss, [x.detach().norm().item() for x in outputs]


def _gradient(model, loss):
    found = torch.autograd.grad(loss.sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


@exercise("parity and bytes", (torch.Tensor, [SCALAR]))
def third(forward):
    """Grade `forward(model, tokens)`, which returns what `saves_nothing` returns, and keeps less than 0.3 of the bytes
    of a plain forward's activations."""
    for seed in range(2):
        torch.manual_seed(seed)
        model, tokens = GPT(CONFIG), torch.randint(0, 256, (2, 64))
        expected, norms = saves_nothing(model, tokens)
        del model.outputs
        with memory.track(model, tokens) as t:
            loss, said = forward(model, tokens)
            kept, whole = t.now.total - t.start.total, memory.activation_bytes(CONFIG, 2, 64)
            found = _gradient(model, loss) if loss.requires_grad and readable(loss) else None
        if not close(loss, expected):
            return f"the loss is {expected.item():.4f}: you return {_loss_shown(loss)}"
        if found is None:
            return "your loss has no graph, so nothing can be trained"
        if len(said) != len(norms):
            return f"saves_nothing returns {len(norms)} norms, you return {len(said)}"
        numbers = [each.item() if isinstance(each, torch.Tensor) else each for each in said]
        for i, (mine, norm) in enumerate(zip(numbers, norms, strict=True)):
            if not abs(mine - norm) <= 1e-4 * norm:
                return f"norm {i} is {norm:.5g} in saves_nothing, you return {mine:.5g}"
        if left := sum(bool(module._forward_hooks) for module in model.modules()):
            return f"hooks are left on {left} modules: call remove() of each handle"
        if kept >= 0.3 * whole:
            return (f"loss and norms are right, but {kept:,} bytes are kept, {kept / whole:.2f} of what a plain "
                    "forward keeps: expected below 0.3")
        exact = _gradient(model, model(tokens, tokens))
        if not (found - exact).norm() <= 0.05 * exact.norm():
            return "loss, norms and bytes are right, but the gradient is off by more than 5 %"
    return None


def _loss_shown(loss):
    return f"{loss.item():.4f} in {loss.dtype}" if loss.numel() == 1 and readable(loss) else _like(loss)
