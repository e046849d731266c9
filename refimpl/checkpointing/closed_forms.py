"""The bytes and FLOPs of each policy on our GPT, in closed form: no run, no tracker.

A step is a chain: the blocks, and the head with its loss. For each stage the symbols of `schedule` are worked out from
the config; `plan_peak` then gives the peak of any plan. Unit sizes, in the symbols of `memory.activation_bytes`:

    U = e·sb·h    Q = e·sb·ad    K = e·sb·gd    F = e·sb·f    S = e·a·b·s²    W = e·h·f, one weight gradient of the MLP

and M, N the dropout masks of scores and tokens, which exist only with dropout. A stage's peak is the largest of a few
moments; each line of `moments` is one of them, named for what it is the moment of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.activation_bytes import activation_terms, block_terms, kept_on, norm_terms
from .schedule import costs, plan_peak

if TYPE_CHECKING:
    from ..config import GPTConfig
    from .schedule import Costs

CORE = ("queries and keys", "values", "causal mask", "softmax output", "softmax dropout mask", "softmax dropout output")
DROPPED = {  # part -> the terms of a block that are not kept, but recomputed
    None: (),
    "attention core": CORE,
    "attention": (*CORE, "projection input"),
    "mlp": ("GELU input", "GELU output", "SiLU input", "SiLU output", "up output", "down input"),
}


@dataclass(frozen=True)
class BlockSizes:
    """The unit sizes of one shape, in bytes, and its dropout and attention as they matter here."""

    U: int
    Q: int
    K: int
    F: int
    S: int
    W: int
    M: int
    N: int
    dropout: bool
    turned: int  # rotated queries and keys, which exist beside qkv
    copied: int  # without rotation: a contiguous copy of the keys
    cloned: int  # without rotation, if there are as many key heads: a copy of the scaled queries

    @classmethod
    def of(cls, config, batch, sequence, dtype, device):
        """Return the sizes of `config` with `batch` sequences."""
        e, token, mask = dtype.itemsize, batch * sequence, kept_on(device, dtype.itemsize).mask
        U, Q, K = (e * token * width for width in (config.hidden, config.q_hidden, config.kv_hidden))
        score, D = batch * config.heads * sequence**2, config.dropout > 0
        rotary = config.positions == "rotary"
        return cls(U=U, Q=Q, K=K, F=e * token * config.mlp_hidden, S=e * score, W=e * config.hidden * config.mlp_hidden,
                   M=D * mask * score, N=D * mask * token * config.hidden, dropout=D,
                   turned=(Q + K) * rotary, copied=K * (not rotary),
                   cloned=Q * (not rotary and config.heads == config.kv_heads))


def moments(config, batch, sequence, dtype=torch.float32, device="cpu", part=None):
    """Predict (s, p, q, r) of one block: what it keeps besides its input, and the peaks of F∅, Fall and B, in bytes.

    Exact but for what is of the size of a bias: within 1 % of the tracker (asserted for each family and policy). Where
    RMSNorm keeps an fp32 copy of its input in the input's place (16 bits on a CPU), a region has both: `copies`.
    ValueError for `post_norms`.
    """
    if config.post_norms:
        raise ValueError("post_norms=True: this closed form covers two norms in a block; use profile_chain or "
                         "memory.dry_run")
    z = BlockSizes.of(config, batch, sequence, dtype, device)
    terms = block_terms(config, batch, sequence, dtype, device)
    U, Q, K, F, S, W, M, D, causal = z.U, z.Q, z.K, z.F, z.S, z.W, z.M, z.dropout, terms["causal mask"]
    whole = sum(terms.values()) - U  # the block's input is the chain's, as x_{i-1}
    copies = U * (config.norm == "rmsnorm" and dtype.itemsize < 4 and not kept_on(device, dtype.itemsize).fused_rms)
    qkv = Q + 2 * K
    s = whole - sum(terms.get(name, 0) for name in DROPPED[part])
    s += (part == "attention core") * (qkv + z.turned)  # the core's region keeps its inputs, q, k and v
    products = 2 + config.gated  # tensors of F bytes that the MLP's forward holds at once
    attention = U + qkv + z.turned + Q + z.copied + K  # norm1(x); q, k, v; scaled q; copies of k and v
    dropping = attention + max(2 * S + Q, D * (3 * S + M))
    saving = attention + z.cloned + causal + max(2 * S + Q, D * (3 * S + M + Q))
    forward = max(dropping, 3 * U + products * F)
    down = s + copies + U + F + max(W, F * (products == 3)) + D * (U - z.N)
    scores = 2 * U + 2 * Q + 3 * K + 2 * S + D * (M + S) + causal
    softmax = 2 * U + Q + 2 * K + (1 + kept_on(device, dtype.itemsize).softmax) * S + M + causal
    backward = [down, scores, softmax]
    if part == "attention core":
        again = attention + z.cloned + causal + U + Q + max(2 * S, D * (3 * S + M))
        backward = [down, again, scores + qkv + z.turned, softmax + qkv + z.turned]
    elif part == "attention":
        backward.append(U + D * U + saving)
    elif part == "mlp":
        backward[0] += whole - s  # the MLP is there again while its down layer is differentiated
    # a part in a region drops what it makes
    keeping = dropping if part in ("attention core", "attention") else saving
    return s, forward, max(keeping, s + copies + 3 * U), max(backward)


def gpt_costs(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
              device: torch.device | str = "cpu", part: str | None = None) -> "Costs":
    """Predict the Costs of a GPT's blocks and its head with the loss, one stage each; times are FLOPs.

    `part`: one part of every kept block is recomputed, as `selective` does. ValueError for an unknown part.
    """
    if part not in DROPPED:
        raise ValueError(f"part={part!r}: expected one of {', '.join(map(repr, DROPPED))}")
    n, z = config.layers, BlockSizes.of(config, batch, sequence, dtype, device)
    s, p, q, r = moments(config, batch, sequence, dtype, device, part)
    *head, head_flops = _head(config, batch, sequence, dtype, device)
    kept, dropping, saving, backward = ([x] * n + [y] for x, y in zip((s, p, q, r), head, strict=True))
    flops = block_flops(config, batch, sequence)
    times = [sum(flops.values())] * n + [head_flops]
    again = recomputed_flops(flops, part, config.dropout)
    waiting = dtype.itemsize * config.vocab_size * config.hidden * config.tied  # a tied head's, until the embedding's
    return costs(times, kept, [z.U] * n + [4], backward_times=[2 * t + again * (i < n) for i, t in enumerate(times)],
                 gradient_bytes=[z.U + waiting] * n + [4], forward_peaks=dropping, saving_peaks=saving,
                 backward_peaks=[r + waiting * (i < n) for i, r in enumerate(backward)], input_bytes=z.U)


def _head(config, batch, sequence, dtype, device):
    """Return (s, p, q, r, FLOPs) of the last norm, the head and the loss. Its softmax is fp32 in any precision."""
    e, token = dtype.itemsize, batch * sequence
    norm = sum(norm_terms(config, token, e, kept_on(device, e)).values()) - e * token * config.hidden
    U, logits, wide = e * token * config.hidden, e * token * config.vocab_size, 4 * token * config.vocab_size
    copied = wide * (e != 4)
    forward = norm + U + logits + copied + wide
    backward = norm + U + max(3 * wide, logits + U + e * config.hidden * config.vocab_size)
    return norm + U + wide + 4, forward, forward, backward, 2 * token * config.hidden * config.vocab_size


def gpt_peak_bytes(config: "GPTConfig", batch: int, sequence: int, plan: Sequence[Any] | None = None,
                   part: str | None = None, dtype: torch.dtype = torch.float32,
                   device: torch.device | str = "cpu") -> int:
    """Predict the peak bytes of a forward and backward above parameters and gradients (all of them there, as when
    gradients are accumulated), with the blocks run by `plan` (default: all kept) and one `part` of each kept block
    recomputed.

        plan_peak(costs) + the token positions, or what else stays around the blocks
        + a random state for each region, with dropout: 5,056 on a CPU, 16 on CUDA
    """
    n = config.layers
    plan = list(range(n)) if plan is None else plan
    # stage n is the head with its loss
    peak = plan_peak(gpt_costs(config, batch, sequence, dtype, device, part), [*plan, n])
    return peak + _around(config, batch, sequence, dtype, device) + _states(config, plan, part, device)


def _around(config, batch, sequence, dtype, device):
    terms = activation_terms(config, batch, sequence, dtype, device)
    names = ("positions", "rotation", "embedding dropout mask")
    return sum(terms.get(name, 0) for name in names)


def _states(config, plan, part, device):
    # only kept blocks recompute a part: a region has it all again
    kept = sum(not isinstance(item, tuple) for item in plan)
    regions = _regions(plan) + kept * (part in ("attention core", "attention"))
    return (config.dropout > 0) * regions * (16 if torch.device(device).type == "cuda" else 5056)


def _regions(plan):
    return sum(1 + _regions(item) for item in plan if isinstance(item, tuple))


def kept_bytes(config: "GPTConfig", batch: int, sequence: int, plan: Sequence[Any] | None = None,
               part: str | None = None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> int:
    """Predict the bytes of activations after the forward of a GPT with targets, under `plan` and `part`: exact.

        activation_bytes − Σ over regions of (their blocks − one input) − Σ over kept blocks of what `part` makes again
    """
    n = config.layers
    plan = list(range(n)) if plan is None else plan
    regions = [item for item in plan if isinstance(item, tuple)]
    z = BlockSizes.of(config, batch, sequence, dtype, device)
    terms = activation_terms(config, batch, sequence, dtype, device)
    s = moments(config, batch, sequence, dtype, device, part)[0] + z.U
    kept = (len(plan) - len(regions)) * s + len(regions) * z.U
    return sum(terms.values()) - terms["blocks"] + kept + _states(config, plan, part, device)


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def block_flops(config: "GPTConfig", batch: int, sequence: int) -> dict[str, int]:
    """Count the FLOPs of one block's forward, {matrix product: FLOPs}, as `torch.utils.flop_counter` does.

    A multiply-add counts 2, so a product (M, K) · (K, N) has 2·M·K·N. Norms, softmax and activations are not counted,
    and attention has all scores, masked or not. A backward has twice as many.
    """
    token, h, f, q = batch * sequence, config.hidden, config.mlp_hidden, config.q_hidden
    scores = 2 * batch * sequence**2 * q
    return {"qkv": 2 * token * h * (q + 2 * config.kv_hidden), "scores": scores, "weighted values": scores,
            "out": 2 * token * q * h, "up": 2 * token * h * f * (1 + config.gated), "down": 2 * token * f * h}


def recomputed_flops(flops, part, dropout=0.0):
    """Count the FLOPs that one block runs again in backward. The last product of a region is not among them: backward
    needs its inputs only, and the recomputation stops there (not with dropout after it: the mask comes later)."""
    return {
        None: 0, "block": sum(flops.values()) - flops["down"] * (not dropout), "attention core": flops["scores"],
        "attention": flops["qkv"] + flops["scores"] + flops["weighted values"], "mlp": flops["up"],
    }[part]


def extra_flops(config: "GPTConfig", batch: int, sequence: int, plan: Sequence[Any] | None = None,
                part: str | None = None, early_stop: bool = True) -> int:
    """Count the FLOPs of a step beyond those without recomputation: exact, for a plan of blocks or one part of each.

        Σ over regions of (their blocks' forward − the last block's last product), + kept blocks · the part
    """
    flops, plan = block_flops(config, batch, sequence), list(range(config.layers)) if plan is None else plan
    dropout = config.dropout or not early_stop  # either way a recomputation runs to its end
    return sum(_again(flops, item, dropout) if isinstance(item, tuple) else recomputed_flops(flops, part, dropout)
               for item in plan)


def _again(flops, region, dropout):
    """Count the FLOPs of recomputing a region and the regions in it. A region at its end needs only its input."""
    *before, last = region
    inner = sum(_again(flops, item, dropout) for item in region if isinstance(item, tuple))
    run = sum(_forward(flops, item) for item in before)  # the last one is below, without its last product
    return run + inner + (0 if isinstance(last, tuple) else recomputed_flops(flops, "block", dropout))


def _forward(flops, item):
    return sum(_forward(flops, i) for i in item) if isinstance(item, tuple) else sum(flops.values())
