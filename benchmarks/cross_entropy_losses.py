"""Several losses of one head beside as many calls, and a head whose vocabulary is split over ranks beside the split
head with logits: bytes and seconds of a step."""

import statistics
from functools import partial

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.comm import launch
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    fused_cross_entropy_bytes,
    fused_multi_token_cross_entropy,
    multi_token_cross_entropy,
)
from refimpl.tensor.conjugate import enter, leave

from .record import row
from .runner import compare

LOSSES, RANKS, ROUNDS = 3, 2, 3
WORDS = 16384  # on a CPU: a third of GPT-2's vocabulary, which takes a third of the time
CALLS, LOGITS = "as many calls", "the split head with logits"


def all_rows(device, size, rounds, dtype):
    """Yield the rows of several losses, then those of a split head."""
    if torch.device(device).type == "cpu":
        size, rounds = size._replace(vocabulary=min(size.vocabulary, WORDS)), min(rounds, ROUNDS)
    yield from several_rows(device, size, rounds, dtype)
    yield from split_rows(device, size, rounds, dtype)


# --- several losses ---------------------------------------------------------------------------------------------------


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
        yield row(f"step of {K} losses of a head, {name}, {str(dtype)[6:]}", CALLS, "s", timing.median(name),
                  timing.median(CALLS), paired=paired(timing.seconds[name], timing.seconds[CALLS]),
                  spread=timing.spread(name), peer_spread=timing.spread(CALLS))


def step(loss, given):
    """Run a forward and a backward; drop the gradients."""
    loss().backward()
    for x in given:
        x.grad = None


def peak(function, device):
    """Return the peak in bytes above the start, as requested from the allocator."""
    with memory.measure(device) as m:
        function()
    return m.peak


def paired(ours, theirs):
    """Return the median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# --- a vocabulary split over ranks ------------------------------------------------------------------------------------


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
    yield row(f"step {what}", LOGITS, "s", statistics.median(seconds["chunked"]), statistics.median(seconds[LOGITS]),
              paired=paired(seconds["chunked"], seconds[LOGITS]), loss_apart=losses["chunked"] - losses[LOGITS])
