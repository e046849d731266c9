"""One hook between q·k and the softmax: what Gemma, ALiBi, packed documents and prefix LMs do to a score.

    S' = f(S, b, h, i, j)        P = softmax(S')        dS = ∂f/∂S ∘ dS'

f looks at one score and at where it is, never at another score. So it is computed for one tile at a time, on scores
that the tile has anyway, and again in backward; no T × S matrix of biases or booleans is ever made. A mask is such an
f, too: −∞ where query i does not see key j. The gradient of a tile is multiplied by ∂f/∂S, and that is all.

Hooks are given as `score=` to `reference_attention`, `tiled_attention` and `flash_attention`; several as a list, from
the first to the last. Your own is a subclass of ScoreHook in PyTorch: it runs in tiles. Those below run in the Triton
kernels, too (`kernels/score.py`).

A sink changes no score, it adds one term to the softmax's sum: a key of score `sinks[h]` and value 0, which takes
weight and gives nothing. It is learned, so it is a tensor of its own, `sinks=`, with the gradient

    P_sink = e^(sink − L)        d sink = − Σ over rows of P_sink · Δ        Δ = rowsum(dO ∘ O)

Sources: Gemma 2 (Riviere et al. 2024), section 2, for the softcap; ALiBi (Press et al. 2022), section 3; T5 (Raffel et
al. 2020), figure 4, for prefix LMs; StreamingLLM (Xiao et al. 2024), section 3, and gpt-oss (OpenAI 2025) for sinks.
"""

import math
from dataclasses import dataclass

import torch


class ScoreHook:
    """The protocol: a function of single scores, and its derivative. By default it changes nothing. A class whose
    `forward` gives −∞ says `masks = True`.

    - `scores`: (B, H, rows, keys), scaled, in fp32 or wider, for one tile; must not be changed in place.
    - `b`, `h`: the index of the sequence (of the batch, or among packed ones) and of the query head; `q_idx`, `k_idx`:
      positions in the sequence. All are int64 tensors that broadcast with `scores`. A query's position is counted as
      that of a key: the last query is beside the last key, so with T > S the first ones are negative.
    """

    masks = False

    def forward(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                k_idx: torch.Tensor) -> torch.Tensor:
        """Return the new scores, −∞ where a query does not see a key: a new tensor, which the caller writes to."""
        return scores

    def derivative(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                   k_idx: torch.Tensor) -> torch.Tensor | float:
        """Return ∂forward/∂scores: a tensor that broadcasts with `scores`, or a number. It must be finite where
        `forward` gives −∞."""
        return 1.0

    def check(self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, causal: bool, sequences: int | None) -> None:
        """Raise ValueError if this hook does not fit a call. `sequences`: how many are packed, None if not packed."""


@dataclass(frozen=True)
class Softcap(ScoreHook):
    """cap · tanh(S / cap): scores stay between −cap and cap. The derivative is 1 − tanh²(S / cap).

    Gemma 2 caps its scores at 50 (Riviere et al. 2024, section 2). ValueError unless `cap` is a finite number above 0.
    """

    cap: float

    def __post_init__(self):
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)) or not 0 < self.cap < math.inf:
            raise ValueError(f"Softcap({self.cap!r}): expected a finite number above 0, such as 50.0; for no cap leave "
                             "the hook out")

    def forward(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                k_idx: torch.Tensor) -> torch.Tensor:
        """Return cap · tanh(S / cap)."""
        return torch.tanh(scores / self.cap) * self.cap

    def derivative(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                   k_idx: torch.Tensor) -> torch.Tensor | float:
        """Return 1 − tanh²(S / cap)."""
        return 1 - torch.tanh(scores / self.cap).square_()


@dataclass(frozen=True, eq=False)
class Alibi(ScoreHook):
    """S − slope_h · |i − j|: attention with linear biases. `slopes`: (H,), constants; `alibi_slopes(H)` are the
    paper's."""

    slopes: torch.Tensor

    def forward(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                k_idx: torch.Tensor) -> torch.Tensor:
        """Return S − slope · distance."""
        return scores - self.slopes.to(scores.dtype)[h] * (q_idx - k_idx).abs()

    def check(self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, causal: bool, sequences: int | None) -> None:
        """Raise ValueError for slopes of other heads, on another device, or that want a gradient."""
        check_tensor("Alibi's slopes", self.slopes, (q_BHTD.shape[1],), "one for each query head", q_BHTD.device)
        if self.slopes.requires_grad:
            raise ValueError("Alibi's slopes require a gradient, which the hook does not compute: give slopes.detach()")


@dataclass(frozen=True, eq=False)
class Documents(ScoreHook):
    """A query sees keys of its own document only. `ids`: (B, S) ints, the document of each token, in any order.

    All tiles of the band are computed. Documents that lie one after the other are better packed by `cu_seqlens`, which
    leaves out the tiles between two of them.
    """

    ids: torch.Tensor
    masks = True

    def forward(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                k_idx: torch.Tensor) -> torch.Tensor:
        """Return S, −∞ between two documents and for a query before the first token."""
        # with T > S the first queries are at positions below 0
        own = self.ids[b, q_idx.clamp(min=0)] == self.ids[b, k_idx]
        return scores.masked_fill(~own | (q_idx < 0), -math.inf)

    def check(self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, causal: bool, sequences: int | None) -> None:
        """Raise ValueError for ids of another shape or dtype, and beside cu_seqlens."""
        shape = (k_BGSD.shape[0], k_BGSD.shape[2])
        check_tensor("Documents' ids", self.ids, shape, "(batch, keys)", q_BHTD.device, integers=True)
        if sequences is not None:
            raise ValueError("Documents with cu_seqlens: expected one of the two; both keep sequences apart")


@dataclass(frozen=True, eq=False)
class PrefixLM(ScoreHook):
    """A causal mask, except that all queries see the first `lengths[b]` keys: a prompt is read in both directions.
    `lengths`: (B,) ints, or one for each packed sequence. For causal=False."""

    lengths: torch.Tensor
    masks = True

    def forward(self, scores: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                k_idx: torch.Tensor) -> torch.Tensor:
        """Return S, −∞ for later keys outside the prefix."""
        return scores.masked_fill((k_idx > q_idx) & (k_idx >= self.lengths[b]), -math.inf)

    def check(self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, causal: bool, sequences: int | None) -> None:
        """Raise ValueError for lengths of another shape or dtype, and under a causal mask, which would hide the
        prefix."""
        count, what = (q_BHTD.shape[0], "batch") if sequences is None else (sequences, "packed sequences")
        check_tensor("PrefixLM's lengths", self.lengths, (count,), f"({what},)", q_BHTD.device, integers=True)
        if causal:
            raise ValueError("PrefixLM with causal=True: expected causal=False, the hook is causal after the prefix")


class ComposedHooks(ScoreHook):
    """Several hooks, from the first to the last: the derivative is the product of theirs."""

    def __init__(self, hooks):
        self.hooks = tuple(hooks)
        self.masks = self.hooks[-1].masks  # masks come last, `hook_of` has seen to that

    def forward(self, scores, *where):
        """Return the scores after all hooks."""
        for hook in self.hooks:
            scores = hook.forward(scores, *where)
        return scores

    def derivative(self, scores, *where):
        """Return the product of the derivatives, each at the scores that its hook is given."""
        product = 1.0
        for hook in self.hooks:
            product = product * hook.derivative(scores, *where)  # the chain rule, at what this hook is given
            scores = hook.forward(scores, *where)
        return product

    def check(self, *call):
        """Raise ValueError for the first hook that does not fit a call."""
        for hook in self.hooks:
            hook.check(*call)


def hook_of(score):
    """Return `score` as one ScoreHook, or None: it is None, a hook, or a list of hooks. Raises TypeError for others,
    and ValueError for a mask before a hook that is none, which could make its −∞ finite."""
    if score is None:
        return None
    hooks = list(score) if isinstance(score, (list, tuple)) else [score]
    for hook in hooks:
        if not isinstance(hook, ScoreHook):
            raise TypeError(f"score has a {type(hook).__name__}: expected a ScoreHook of refimpl.attention.scores, "
                            "such as Softcap(50.0), or a list of them")
    for first, second in zip(hooks, hooks[1:], strict=False):
        if first.masks and not second.masks:
            raise ValueError(f"score has {type(second).__name__} after {type(first).__name__}, a mask: expected masks "
                             "last")
    if len(hooks) > 1:
        return ComposedHooks(hooks)
    return hooks[0] if hooks else None


def as_kernels_take(hook):
    """Return a ScoreHook, or None, as (softcap, slopes, documents, prefix); None if the kernels cannot compute it: a
    class that they do not know, two hooks of one class, or a softcap after ALiBi."""
    hooks = () if hook is None else (hook,)
    if isinstance(hook, ComposedHooks):
        hooks = hook.hooks
    found, kinds = {type(each): each for each in hooks}, [type(each) for each in hooks]
    # a subclass may compute something else
    known = all(kind in (Softcap, Alibi, Documents, PrefixLM) for kind in kinds) and len(found) == len(kinds)
    if not known or (Softcap in kinds and kinds[0] is not Softcap):
        return None
    return (found[Softcap].cap if Softcap in found else None,
            *(getattr(found[kind], name) if kind in found else None
              for kind, name in ((Alibi, "slopes"), (Documents, "ids"), (PrefixLM, "lengths"))))


def check_tensor(name, x, shape, means, device, integers=False):
    """Raise TypeError or ValueError for a tensor of another shape, kind of numbers or device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} are a {type(x).__name__}: expected a tensor of shape {shape}, {means}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} of shape {tuple(x.shape)}: expected {tuple(shape)}, {means}")
    # ids are compared, slopes are multiplied
    if integers == x.dtype.is_floating_point or x.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise ValueError(f"{name} are {x.dtype}: expected {'ints' if integers else 'floating-point numbers'}")
    if x.device != device:
        raise ValueError(f"{name} are on {x.device}, q is on {device}: move them with .to(q.device)")


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the (heads,) slopes of ALiBi in fp32: 2^(−8h / heads) for h = 1 … heads. If heads is no power of two,
    those of the power n below it, and then every other one of 2n (Press et al. 2022, section 3, and their code)."""
    below = 2 ** int(math.log2(heads))  # for other numbers of heads the slopes of n and 2n interleave
    slopes = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    slopes += [2 ** (-4 * (h + 1) / below) for h in range(0, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def sink_gradient(sinks_H, lse_BHT, delta_BHT):
    """Return d sink = − Σ over batch and rows of e^(sink − L) · Δ, (H,), from natural logsumexps that count the sink
    and Δ less the logsumexp's own gradient."""
    return (sinks_H.to(lse_BHT.dtype)[:, None] - lse_BHT).exp_().mul_(delta_BHT).sum((0, 2)).neg_()
