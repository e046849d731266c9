"""What readers build on the page *Smaller activations*: 8 bits a value, and the hooks that keep activations so."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from exercises import readable
from exercises.smaller_activations import watched
from refimpl import memory

from . import blank

HINTS = {
    "encode": [
        "`x.view(-1, group)` has one group a row. `aminmax(dim=1, keepdim=True)` gives the least and the largest value "
        "of each row.",
        "A step is (largest − least) / 255. A code is (x − least) / step, rounded to the nearest whole number.",
        "A group of equal values has a step of 0, and x − least is 0, too: divide by another number there. Then "
        "`.flatten().to(torch.uint8)`."],
    "decode": [
        "`codes.view(len(step), -1)` has one group a row again, beside its least value and its step.",
        "`rows * step` is fp32, since step is. Add `least`, and flatten."],
    "hooks": [
        "Collect `p.untyped_storage().data_ptr()` of all parameters in a set first. What lies at such an address stays "
        "whole.",
        "`pack` returns `x.detach()` for what stays whole, else a tuple: the three tensors of `encode` on "
        "`x.detach().flatten()`, and `x.shape`.",
        "`unpack` returns a tensor as it is. Of a tuple it decodes the first three, and views the result in the "
        "shape."]}


def encode(x, group):
    """Return x in 8 bits a value: (codes, least, step).

    x is (n,) fp32, and `group` divides n. Codes are (n,) uint8. Of each group,
    `least` is the least value, and `step` is (largest − least) / 255. Both are
    (n / group, 1) fp32. A group of equal values gets codes of 0. x stays as it is.
    """
    rows = x.view(-1, group)
    least, most = rows.aminmax(dim=1, keepdim=True)
    step = (most - least) / 255
    codes = (rows - least) / torch.where(step > 0, step, torch.inf)
    return codes.round().flatten().to(torch.uint8), least, step


def decode(codes, least, step):
    """Return least + code · step of each value, (n,) fp32: the inverse of `encode`."""
    rows = codes.view(len(step), -1)
    return (least + rows * step).flatten()


def hooks(model, group):
    """Return (pack, unpack), which keep activations in 8 bits.

    `pack(x)` returns what is kept of x. `unpack` gets that, and returns a tensor of
    x's shape. Three kinds stay whole, as `x.detach()`: what requires no gradient,
    what shares a parameter's storage, and what `group` does not divide (x.numel()).
    """
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        shared = x.untyped_storage().data_ptr() in owned
        if shared or not x.requires_grad or x.numel() % group:
            return x.detach()
        return *encode(x.detach().flatten(), group), x.shape

    def unpack(kept):
        return kept if torch.is_tensor(kept) else decode(*kept[:3]).view(kept[3])

    return pack, unpack


def _values(groups, group):
    """Return random values, in groups that differ in place and range; the second is all the same, the third tiny."""
    torch.manual_seed(group)
    rows = torch.randn(groups, group) * 10.0 ** (torch.arange(groups)[:, None] % 4 - 1) - 3
    rows[1] = 0.7
    rows[2] *= 1e-8
    return rows.flatten()


@blank(encode, "rounding and bytes", (torch.Tensor, torch.Tensor, torch.Tensor))
def check_encode(encode):
    """Check the dtypes and shapes, the bytes, the least values and steps, and how far each value is off."""
    for groups, group in ((6, 128), (9, 20)):
        x = _values(groups, group)
        said = encode(given := x.clone(), group)
        for name, each, shape, dtype in zip(("codes", "least", "step"), said, ((len(x),), (groups, 1), (groups, 1)),
                                            (torch.uint8, torch.float32, torch.float32), strict=True):
            if tuple(each.shape) != shape or each.dtype != dtype:
                return f"{name}: expected shape {shape} in {dtype}, you return {tuple(each.shape)} in {each.dtype}"
        nbytes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in said}
        if not all(map(readable, said)):
            return "a tensor has no bytes: its storage was freed"
        if sum(nbytes.values()) != len(x) + 8 * groups:
            return (f"{len(x)} values in groups of {group} take {sum(nbytes.values()):,} bytes: expected "
                    f"{len(x) + 8 * groups:,} (does a view keep a larger storage?)")
        if not torch.equal(given, x):
            return "x was changed: autograd's own tensor lies there"
        codes, least, step = said
        low, high = x.view(groups, group).aminmax(dim=1, keepdim=True)
        if not torch.allclose(least, low, rtol=1e-6, atol=0):
            return "least is not the least value of each group"
        if not torch.allclose(step, (high - low) / 255, rtol=1e-5, atol=0):
            return "step is not (largest − least) / 255 of each group"
        off = (x.view(groups, group) - low - codes.view(groups, group) * step).abs().amax(1)
        for i in range(groups):
            if step[i] == 0 and codes.view(groups, group)[i].any():
                return f"the values of group {i} are all equal: expected codes of 0"
            if off[i] > 0.505 * step[i] + 1e-6 * high[i].abs():
                far = (off[i] / step[i]).item()
                return (f"group {i} of {group} values is off by {far:.3f} of a step; 0.5 is the most. Its values go "
                        f"from {low[i].item():.3g} to {high[i].item():.3g}")
    return None


@blank(decode, "the values", torch.Tensor)
def check_decode(decode):
    """Check the decoded values of random codes, group by group."""
    for groups, group in ((6, 128), (9, 20)):
        torch.manual_seed(group)
        codes = torch.randint(0, 256, (groups * group,), dtype=torch.uint8)
        least, step = torch.randn(groups, 1) - 3, torch.rand(groups, 1)
        step[1] = 0
        expected = torch.cat([low + part * by for low, by, part in zip(least, step, codes.split(group), strict=True)])
        said = decode(codes.clone(), least.clone(), step.clone())
        if said.shape != expected.shape or said.dtype != expected.dtype:
            return (f"expected shape {tuple(expected.shape)} in {expected.dtype}, you return {tuple(said.shape)} in "
                    f"{said.dtype}")
        if not readable(said):
            return "the storage of your tensor was freed"
        wrong = ~torch.isclose(said, expected, rtol=1e-5, atol=1e-5)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            return (f"value {i} is least + code · step = {expected[i].item():.5g} of group {i // group}, you return "
                    f"{said[i].item():.5g}")
    return None


class _Net(torch.nn.Module):
    """Saves inputs, weights, outputs of operations, a mask of dropout and a transposed view."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 64), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        x = self.first(x).tanh()
        x = torch.nn.functional.dropout(x, 0.2)
        return (self.last(x).softmax(-1).T @ x).sin().square().sum()


def _kept(context, batch):
    """Return (loss, gradients, bytes kept for backward, bytes left when a loss goes without one) of a step."""
    torch.manual_seed(batch)
    model, x = _Net(), torch.randn(batch, 32)
    with memory.track(model, x) as t:
        with context(model):
            loss = model(x)
        kept = t.now["activations"]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        value = loss.item()
        del loss
        before = t.now.total
        with context(model):
            model(x)
        left = t.now.total - before
    return value, torch.cat([each.flatten() for each in gradients]), kept, left


def _made(pack, x):
    """Return the bytes of what `pack` makes for x, in which x itself does not count."""
    with memory.track(x) as t:
        kept = pack(x)
        found = t.now.total - t.start.total
        del kept
    return found


def _not_whole(answer, group):
    """Return a sentence if `pack` makes bytes of its own for what has to stay whole."""
    model, x = _Net(), torch.randn(3 * group // 2, requires_grad=True)
    pack, _ = answer(model, group)
    for what, each in {"a tensor that requires no gradient": torch.randn(group),
                       "a view of a weight, which shares the parameter's storage,": model.last.weight.T,
                       f"a tensor of {len(x)} values, which group = {group} does not divide,": x * 1}.items():
        if nbytes := _made(pack, each):
            return f"{what} does not stay whole: pack makes {nbytes:,} bytes for it, and x.detach() makes none"
    return None


def _in_bytes(answer, group):
    """Say how many bytes `pack` makes for an activation, if it is not as many as a code has."""
    x = torch.randn(2 * group, 3, requires_grad=True) * 1
    made, expected = _made(answer(_Net(), group)[0], x), x.numel() + 8 * 6
    return "" if made == expected else (
        f". Of an activation of shape {tuple(x.shape)} pack makes {made:,} bytes with group = {group}: expected "
        f"{expected:,}, its codes, least and step")


@blank(hooks, "parity and bytes", (callable, callable))
def check_hooks(answer):
    """Check the loss, the gradient, the bytes that are kept until backward, and that none stay without one."""
    for group in (128, 64):
        if wrong := _not_whole(answer, group):
            return wrong
    for batch in (96, 3):  # of 3, group does not divide all
        for group in (128, 64):
            plain, exact, *_ = _kept(lambda model: torch.enable_grad(), batch)
            _, ours, expected, _ = _kept(lambda model, group=group: saved_tensors_hooks(*hooks(model, group)), batch)
            loss, gradient, kept, left = _kept(
                lambda model, group=group: watched(*answer(model, group)), batch)
            if loss != plain:
                return f"the loss is {plain:.6g}, with your hooks {loss:.6g}: forward must not change"
            far, near = ((each - exact).norm() / exact.norm() for each in (gradient, ours))
            if not far <= 2 * near + 1e-6:
                return f"the gradient is off by {far.item():.2%}, with ours by {near.item():.2%}"
            if kept != expected:
                return (f"loss and gradient are right, but {kept:,} bytes are kept: expected {expected:,}"
                        + _in_bytes(answer, group))
            if left:
                return (f"{left:,} bytes stay when a loss is dropped without backward: what an operation saves of its "
                        "own output holds itself, unless pack returns x.detach()")
    return None
