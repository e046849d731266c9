"""A head without its logits beside the plain one, and an MLP without its hidden layer: bytes and seconds of a step.
Several losses of one head stand beside as many calls, and a vocabulary split over ranks beside its head with logits.

A step is forward and backward of the head alone: hidden states and weight to the loss and their gradients. On a CPU it
is that of GPT-2 small, on a GPU that of Llama-3-8B. `cut_cross_entropy` and `liger_kernel` take part where they can be
imported. In bf16 the gradients' errors stand beside the plain head's, both against fp64.
"""

import importlib.util
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.comm import launch
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    fused_cross_entropy_bytes,
    fused_linear_cross_entropy,
    fused_multi_token_cross_entropy,
    multi_token_cross_entropy,
    plain_cross_entropy_bytes,
)
from refimpl.mlp import MemoryEfficientMLP, mlp_bytes, plain_mlp_saved_bytes
from refimpl.tensor.conjugate import enter, leave

from .record import row
from .runner import Comparison, compare, peak


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
LOSSES, RANKS, ROUNDS = 3, 2, 3
WORDS = 16384  # on a CPU: a third of GPT-2's vocabulary, which takes a third of the time
CALLS, LOGITS = "as many calls", "the split head with logits"


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
        steps = {name: partial(step, partial(loss, *given), given[:2]) for name, loss in known.items()}
        yield from time_rows(steps, PLAIN, "a head", dtype, rounds, MOST_TIME[torch.device(device).type])
        steps.clear()
        del given
    yield from error_rows(device)
    yield from losses_rows(device, size, rounds, dtypes[0])
    yield from mlp_rows(device, size, rounds, dtypes[0])


def inputs(device, size, dtype):
    """Make (hidden, weight, targets), of a size at which softmax is neither flat nor sharp."""
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(size.vocabulary, size.features, device=device) * 0.05).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(size.vocabulary, (size.tokens,), device=device)


def step(loss, given):
    """Run a forward and a backward; drop the gradients of `given`."""
    loss().backward()
    for x in given:
        x.grad = None


def byte_rows(known, given, size, dtype, device):
    """Yield each head's peak beside the plain one's, with what its closed form says."""
    N, V, C = size.tokens, size.vocabulary, size.features
    kind = torch.device(device).type
    forms = {PLAIN: plain_cross_entropy_bytes(N, V, C, dtype).peak,
             CHUNKED: chunked_cross_entropy_bytes(N, V, C, dtype, device=kind).peak}
    if kind == "cuda":
        forms |= dict.fromkeys((FUSED, SKIPPING), fused_cross_entropy_bytes(N, V, C, dtype, device=kind).peak)
    peaks = {name: peak(partial(step, partial(loss, *given), given[:2]), device) for name, loss in known.items()}
    for name in known:
        yield row(f"peak of a head's step, {name}, {str(dtype)[6:]}", PLAIN, "bytes", peaks[name], peaks[PLAIN],
                  predicted=forms.get(name))


def time_rows(steps, peer, what, dtype, rounds, limit):
    """Yield the seconds of each step beside those of `peer`."""
    timing = compare(steps, rounds=rounds, title=f"{what}, {str(dtype)[6:]}")
    for name in steps:
        paired = timing.paired(name, peer)
        yield timing.row(f"step of {what}, {name}, {str(dtype)[6:]}", name, peer, paired=paired, limit=limit,
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


# --- an MLP ----------------------------------------------------------------------------------------------------------


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


# --- several losses, and a vocabulary split over ranks ---------------------------------------------------------------


def losses_rows(device, size, rounds, dtype):
    """Yield the rows of several losses, then those of a split head."""
    if torch.device(device).type == "cpu":
        size, rounds = size._replace(vocabulary=min(size.vocabulary, WORDS)), min(rounds, ROUNDS)
    yield from several_rows(device, size, rounds, dtype)
    yield from split_rows(device, size, rounds, dtype)


def several_rows(device, size, rounds, dtype):
    """Yield bytes and seconds of LOSSES losses of one head."""
    kind, K = torch.device(device).type, LOSSES
    torch.manual_seed(0)
    weight = (torch.randn(size.vocabulary, size.features, device=device) * 0.05).to(dtype).requires_grad_()
    hiddens = [torch.randn(size.tokens, size.features, device=device).to(dtype).requires_grad_() for _ in range(K)]
    targets = list(torch.randint(size.vocabulary, (K, size.tokens), device=device))
    forms = {"chunked": chunked_cross_entropy_bytes}
    calls = {CALLS: lambda: sum(chunked_linear_cross_entropy(hidden, weight, each)
                                for hidden, each in zip(hiddens, targets, strict=True)),
             "chunked": lambda: multi_token_cross_entropy(hiddens, weight, targets)[0]}
    if kind == "cuda":
        forms["fused"] = fused_cross_entropy_bytes
        calls["fused"] = lambda: fused_multi_token_cross_entropy(hiddens, weight, targets)[0]
    steps = {name: partial(step, call, [*hiddens, weight]) for name, call in calls.items()}
    peaks = {name: peak(each, device) for name, each in steps.items()}
    for name, form in forms.items():
        yield row(f"peak of {K} losses of a head, {name}, {str(dtype)[6:]}", CALLS, "bytes", peaks[name], peaks[CALLS],
                  words=size.vocabulary,
                  predicted=form(size.tokens, size.vocabulary, size.features, dtype, parts=K, device=kind).peak)
    timing = compare(steps, rounds=rounds, title=f"{K} losses, {str(dtype)[6:]}")
    for name in forms:
        yield timing.row(f"step of {K} losses of a head, {name}, {str(dtype)[6:]}", name, CALLS,
                         paired=timing.paired(name, CALLS))


def with_logits(comm, hidden, weight, targets, first):
    """Return the loss of a split head as it is usually written, "Megatron-LM" (Shoeybi et al. 2019), section 3: logits
    of a rank's words, and sums over ranks of one number a row. `first`: the number of the first of these words."""
    logits = F.linear(enter(hidden, comm), weight).float()
    z = logits - comm.all_reduce(logits.detach().amax(1), "max")[:, None]
    here = (targets >= first) & (targets < first + len(weight))
    found = z.gather(1, (targets - first).clamp(0, len(weight) - 1)[:, None])[:, 0] * here
    return (leave(z.exp().sum(1), comm).log() - leave(found, comm)).mean()


def on_a_rank(comm, size, rounds, dtype, threads):
    """Return ({name: peak in bytes}, {name: seconds of each round}) of the split heads on this rank, and the loss of
    each."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    first, end = (rank * size.vocabulary // comm.world_size for rank in (comm.rank, comm.rank + 1))
    hidden = torch.randn(size.tokens, size.features).to(comm.device, dtype).requires_grad_()
    targets = torch.randint(size.vocabulary, (size.tokens,)).to(comm.device)
    weight = (torch.randn(size.vocabulary, size.features) * 0.05)[first:end].to(comm.device, dtype).requires_grad_()
    calls = {LOGITS: partial(with_logits, comm, hidden, weight, targets, first),
             "chunked": partial(chunked_linear_cross_entropy, hidden, weight, targets, comm=comm,
                                vocabulary=size.vocabulary)}
    losses = {name: call().item() for name, call in calls.items()}
    steps = {name: partial(step, call, [hidden, weight]) for name, call in calls.items()}
    peaks = {name: peak(each, comm.device) for name, each in steps.items()}
    return peaks, compare(steps, rounds=rounds, title="a split head").seconds, losses


def split_rows(device, size, rounds, dtype):
    """Yield bytes and seconds of a head whose words are split over RANKS ranks, of rank 0. None on a single GPU: there
    the ranks would take turns."""
    kind = torch.device(device).type
    if kind == "cuda" and torch.cuda.device_count() < RANKS:
        return
    threads = max(1, torch.get_num_threads() // RANKS)
    (peaks, seconds, losses), *_ = launch(on_a_rank, RANKS, size, rounds, dtype, threads, device=kind, timeout=None)
    what = f"of a split head, {RANKS} ranks, chunked, {str(dtype)[6:]}"
    form = chunked_cross_entropy_bytes(size.tokens, size.vocabulary // RANKS, size.features, dtype, split=True,
                                       device=kind)
    yield row(f"peak {what}", LOGITS, "bytes", peaks["chunked"], peaks[LOGITS], predicted=form.peak,
              words=size.vocabulary)
    timing = Comparison(seconds)
    yield row(f"step {what}", LOGITS, "s", timing.median("chunked"), timing.median(LOGITS),
              paired=timing.paired("chunked", LOGITS), loss_apart=losses["chunked"] - losses[LOGITS])
