"""Exercises of the page *Smaller activations*."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from refimpl import memory
from refimpl.activations import compress_activations
from refimpl.model import GPT, GPTConfig

from . import SCALAR, exercise

CONFIG = GPTConfig(vocab_size=256, context_length=64, layers=3, hidden=64, heads=4)


@exercise("parity and bytes", (callable, callable))
def first(hooks):
    """Grade `hooks()`, which returns (pack, unpack) for `saved_tensors_hooks` that keep a boolean tensor in one bit an
    element."""
    for n in (4096, 4099):
        x = torch.randn(n, requires_grad=True)
        pack, unpack = hooks()
        with memory.track(x) as t, saved_tensors_hooks(pack, unpack):
            y = x.masked_fill(x > 0, 0).sum()
        kept = t.now["activations"]
        gradient, = torch.autograd.grad(y, x)
        if not torch.equal(gradient, (x <= 0).float()):
            return f"a mask of {n:,} elements gives another gradient"
        if kept > -(-n // 8) + 64:
            return (f"the gradient is right, but a mask of {n:,} elements keeps {kept:,} bytes: expected "
                    f"{-(-n // 8):,}")
    return None


@exercise("what is computed", tuple)
def second(code):
    """Grade `code(x, group)`, which returns (tensors, decode) for fp32 values (n,).

    `decode(*tensors)` differs from x by at most half a quantization step, (max − min) / 255 of a group. The tensors
    take n + 8·⌈n/group⌉ bytes.
    """
    for n, group in ((1024, 64), (1000, 128)):
        x = torch.randn(n)
        x[: 2 * group] = 0.5  # no range at all
        tensors, decode = code(x.clone(), group)
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        if nbytes > n + 8 * -(-n // group):
            return f"{n} values in groups of {group} take {nbytes:,} bytes: expected {n + 8 * -(-n // group):,}"
        parts, found = x.split(group), decode(*tensors).split(group)
        for i, (part, back) in enumerate(zip(parts, found, strict=True)):
            step, off = (part.max() - part.min()) / 255, (part - back).abs().max()
            if not off <= 0.51 * step + 1e-6:  # NaN is not
                return f"group {i} of {n} values is off by {off:.2g}, with a step of {step:.2g}"
    return None


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


@exercise("parity and bytes", SCALAR)
def third(forward):
    """Grade `forward(model, tokens)`, which returns what `saves_nothing` returns, and keeps less than 0.3 of the bytes
    of a plain forward's activations."""
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.randint(0, 256, (2, 64))
    expected_loss, expected = saves_nothing(model, tokens)
    del model.outputs
    with memory.track(model, tokens) as t:
        loss, norms = forward(model, tokens)
    if not torch.equal(loss, expected_loss) or not torch.allclose(torch.tensor(norms), torch.tensor(expected)):
        return "loss and norms are not those of saves_nothing"
    kept, whole = t.now.total - t.start.total, memory.activation_bytes(CONFIG, 2, 64)
    loss.backward()
    return None if kept < 0.3 * whole else f"{kept:,} of {whole:,} bytes are kept: expected below 0.3"
