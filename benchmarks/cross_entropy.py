"""A head without its logits beside the plain one, and an MLP without its hidden layer: bytes and seconds of a step.
Several losses of one head, and a vocabulary split over ranks, are in `cross_entropy_losses.py`.

A step is forward and backward of the head alone: hidden states and weight to the loss and their gradients. On a CPU it
is that of GPT-2 small, on a GPU that of Llama-3-8B. `cut_cross_entropy` and `liger_kernel` take part where they can be
imported. In bf16 the gradients' errors stand beside the plain head's, both against fp64.
"""

import importlib.util
import statistics
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    fused_cross_entropy_bytes,
    fused_linear_cross_entropy,
    plain_cross_entropy_bytes,
)
from refimpl.mlp import MemoryEfficientMLP, mlp_bytes, plain_mlp_saved_bytes

from . import cross_entropy_losses
from .record import row
from .runner import compare


class Size(NamedTuple):
    """Of a head, and of an MLP of the same model."""

    tokens: int
    vocabulary: int
    features: int
    hidden: int
    activation: str


SIZES = {"cpu": Size(1024, 50257, 768, 3072, "gelu_tanh"), "cuda": Size(8192, 128256, 4096, 14336, "swiglu")}
MOST_TIME = {"cpu": 1.10, "cuda": 1.00}  # the limits, as multiples of the plain head's time
PLAIN, CHUNKED, FUSED, SKIPPING = "the plain head", "chunked", "fused", "fused, skip 2⁻¹²"
SKIP = 2.0**-12


def plain(hidden, weight, targets):
    """Return the loss from logits, as it is usually written."""
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def heads(device):
    """Return {name: loss}: the plain one, ours, and those of others that can be imported."""
    found, on_gpu = {PLAIN: plain, CHUNKED: chunked_linear_cross_entropy}, torch.device(device).type == "cuda"
    if on_gpu:
        found |= {FUSED: fused_linear_cross_entropy, SKIPPING: partial(fused_linear_cross_entropy, skip=SKIP)}
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        # Its kernels need a GPU; on a CPU it has the plain head under torch.compile.
        found["cut-cross-entropy"] = partial(linear_cross_entropy, impl="cce" if on_gpu else "torch_compile")
    if on_gpu and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["liger-kernel"] = lambda hidden, weight, targets: loss(weight, hidden, targets)
    return found


def run(device="cpu", size=None, rounds=7, dtypes=None):
    """Measure all on `device`: (settings, rows). `size` replaces the device's."""
    kind = torch.device(device).type
    size = size or SIZES[kind]
    dtypes = dtypes or ([torch.float32, torch.bfloat16] if kind == "cpu" else [torch.bfloat16])
    settings = {"size": size._asdict(), "rounds": rounds, "threads": torch.get_num_threads(),
                "dtypes": [str(dtype)[6:] for dtype in dtypes], "most time, of the plain head's": MOST_TIME[kind]}
    return settings, all_rows(device, size, rounds, dtypes)


def all_rows(device, size, rounds, dtypes):
    """Yield the rows of bytes, of time and of errors of the heads, of several losses and of split heads, then those of
    the MLPs."""
    for dtype in dtypes:
        given = inputs(device, size, dtype)
        known = heads(device)
        yield from byte_rows(known, given, size, dtype, device)
        steps = {name: partial(step, loss, *given) for name, loss in known.items()}
        yield from time_rows(steps, PLAIN, "a head", dtype, rounds, MOST_TIME[torch.device(device).type])
        steps.clear()
        del given
    yield from error_rows(device)
    yield from cross_entropy_losses.all_rows(device, size, rounds, dtypes[0])
    yield from mlp_rows(device, size, rounds, dtypes[0])


def inputs(device, size, dtype):
    """Make (hidden, weight, targets), of a size at which softmax is neither flat nor sharp."""
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(size.vocabulary, size.features, device=device) * 0.05).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(size.vocabulary, (size.tokens,), device=device)


def step(loss, hidden, weight, targets):
    """Run a forward and a backward; drop the gradients."""
    loss(hidden, weight, targets).backward()
    hidden.grad = weight.grad = None


def peak(function, device):
    """Return the peak in bytes above the start, as requested from the allocator."""
    with memory.measure(device) as m:
        function()
    return m.peak


def byte_rows(known, given, size, dtype, device):
    """Yield each head's peak beside the plain one's, with what its closed form says."""
    N, V, C = size.tokens, size.vocabulary, size.features
    kind = torch.device(device).type
    forms = {PLAIN: plain_cross_entropy_bytes(N, V, C, dtype).peak,
             CHUNKED: chunked_cross_entropy_bytes(N, V, C, dtype, device=kind).peak}
    if kind == "cuda":
        forms |= dict.fromkeys((FUSED, SKIPPING), fused_cross_entropy_bytes(N, V, C, dtype, device=kind).peak)
    peaks = {name: peak(partial(step, loss, *given), device) for name, loss in known.items()}
    for name in known:
        yield row(f"peak of a head's step, {name}, {str(dtype)[6:]}", PLAIN, "bytes", peaks[name], peaks[PLAIN],
                  predicted=forms.get(name))


def time_rows(steps, peer, what, dtype, rounds, limit):
    """Yield the seconds of each step beside those of `peer`: medians, and the median of their ratios round by round."""
    timing = compare(steps, rounds=rounds, title=f"{what}, {str(dtype)[6:]}")
    for name in steps:
        paired = statistics.median(a / b for a, b in zip(timing.seconds[name], timing.seconds[peer], strict=True))
        yield row(f"step of {what}, {name}, {str(dtype)[6:]}", peer, "s", timing.median(name), timing.median(peer),
                  paired=paired, limit=limit, spread=timing.spread(name), peer_spread=timing.spread(peer),
                  note=f"{paired:.3f} round by round")


def error_rows(device, draws=4):
    """Yield the gradients' root mean square errors in bf16, each head's beside the plain one's."""
    small = Size(512, 4096, 256, 0, "")
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in heads(device)}
    for seed in range(draws):
        torch.manual_seed(seed)
        hidden, weight = (torch.randn(n, small.features, device=device).mul_(scale).bfloat16().requires_grad_()
                          for n, scale in ((small.tokens, 1), (small.vocabulary, 0.1)))
        targets = torch.randint(small.vocabulary, (small.tokens,), device=device)
        wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        exact = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets), wide)
        for name, loss in heads(device).items():
            found = torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))
            sums[name] += torch.stack([((a.double() - b).norm() / b.norm()).square().cpu()
                                       for a, b in zip(found, exact, strict=True)])
    for name, total in sums.items():
        for which, ours, theirs in zip(("hidden", "weight"), total, sums[PLAIN], strict=True):
            yield row(f"error of the gradient of {which}, {name}, bfloat16", PLAIN, "of its norm",
                      (ours / draws).sqrt().item(), (theirs / draws).sqrt().item())


def mlp_rows(device, size, rounds, dtype):
    """Yield what an MLP keeps for backward, its output included, and the seconds of its step, beside plain layers'."""
    d, h = size.features, size.hidden
    how = {"bias": False, "dtype": dtype, "device": device}
    layers = {f"keep={keep!r}": MemoryEfficientMLP(d, h, size.activation, keep=keep, **how)
              for keep in ("hidden", "input")}
    any_one = next(iter(layers.values()))
    calls = {"plain layers": partial(plain_mlp, any_one), **layers}
    x = torch.randn(size.tokens, d, dtype=dtype, device=device, requires_grad=True)
    upstream = torch.randn_like(x)

    def stepped(call):
        call(x).backward(upstream)
        x.grad = None
        for layer in layers.values():
            layer.zero_grad()

    kept = {name: kept_by(partial(call, x), device) for name, call in calls.items()}
    for name, call in calls.items():
        if name == "plain layers":
            saved = plain_mlp_saved_bytes(size.tokens, h, dtype, activation=size.activation)
        else:
            saved = mlp_bytes(size.tokens, d, h, dtype, activation=size.activation, bias=False, keep=call.keep).saved
        yield row(f"kept of an MLP for backward, {name}, {str(dtype)[6:]}", "plain layers", "bytes", kept[name],
                  kept["plain layers"], predicted=saved + x.nbytes)
    steps = {name: partial(stepped, call) for name, call in calls.items()}
    yield from time_rows(steps, "plain layers", "an MLP", dtype, rounds, None)


def kept_by(function, device):
    """Return the bytes that are there after a forward, as requested from the allocator."""
    with memory.measure(device) as m:
        output = function()
    del output
    return m.net


def plain_mlp(mlp, x):
    """Compute an MLP as plain layers do."""
    if mlp.activation == "swiglu":
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return mlp.down_proj(F.gelu(mlp.up_proj(x), approximate="tanh"))
