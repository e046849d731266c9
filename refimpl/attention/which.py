"""Which attention when: seven ways to attend by bytes and FLOPs, and the one to take for a GPU, a model and a length.

    standard, memory-efficient, flash     the same numbers, softmax over all keys; they differ in bytes alone
    Longformer, BigBird                   softmax over listed blocks: a token that no path leads to is not seen
    Linformer                             softmax over k mixtures of all tokens: not causal
    linear                                a state (the gated delta rule): what does not fit into it is forgotten

What a method costs is a closed form (`closed`), held to what is measured (`measured`). What it loses is a reading: how
often a model finds the value of a key that it has seen 1,500 tokens before (`python -m refimpl bench recall`). So
`recommend` takes one of those that fit and find it, an exact one unless another pays for what it loses, and says beside
it what the articles on the subject say.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..common.activation_bytes import block_terms
from ..common.state_bytes import model_state_bytes
from .block_sparse import block_sparse_attention, block_sparse_attention_bytes, block_sparse_attention_flops
from .call.sequences import tiles
from .flash import flash_attention_bytes
from .linear.delta_rule import delta_rule_bytes, delta_rule_flops, gated_delta_rule
from .linformer_projection import linformer_attention, linformer_bytes, linformer_flops
from .masks import bigbird_mask, longformer_mask
from .memory_efficient import memory_efficient_attention, memory_efficient_attention_bytes
from .reference import attention_flops, reference_attention, reference_attention_bytes
from .tiled import tiled_attention, tiled_attention_bytes

if TYPE_CHECKING:
    from ..catalog import Hardware
    from ..config import GPTConfig

Shape = Sequence[int]
WINDOW, GLOBALS, RANDOM, BLOCK, K = 256, 64, 3, 64, 256  # Longformer's window, BigBird's blocks, Linformer's k
MOST = 2**16  # tokens of the longest mask that is made
CORE = ("causal mask", "softmax output")  # what dense attention keeps beside q, k, v and the output

# Below how many tokens → what the articles say.
BANDS = {1_000: "FlashAttention-2", 10_000: "FlashAttention-2, in chunks", 100_000: "Longformer or BigBird",
         math.inf: "Linformer, or sparse attention of one's own"}
# Names that circulate beside the real ones → what there is in their place.
NEVER = {"Longformer-2025": "Longformer (Beltagy et al. 2020)", "BigBird-GS": "BigBird (Zaheer et al. 2020)",
         "MEA-X": "memory-efficient attention (Rabe and Staats 2021)", "Linformer++": "Linformer (Wang et al. 2020)"}


@functools.lru_cache(32)
def _mask(name, T):
    if name == "Longformer":
        return longformer_mask(T, WINDOW, min(GLOBALS, T), causal=True, block=BLOCK)
    return bigbird_mask(T, BLOCK, min(2 * BLOCK, T), min(RANDOM, -(-T // BLOCK)), 0, causal=True, block=BLOCK)


def _listed(name, shape):
    """Count the FLOPs of listed blocks. Beyond MOST tokens they grow as between half of that and all."""
    B, H, T, D = shape
    if T <= MOST:
        return block_sparse_attention_flops(shape, shape, _mask(name, T)).forward
    half, whole = (_listed(name, (B, H, length, D)) for length in (MOST // 2, MOST))
    return whole + (whole - half) * (T - MOST) // (MOST // 2)


class Method(NamedTuple):
    """One way to attend, for shapes (B, H, T, D) of q, k and v alike. `exact`: softmax over all keys.

    `peak(shape, dtype, kernels)`, bytes of a forward and backward; `flops(shape)`, of a forward; `call(shape)`, the
    form in PyTorch, of q, k and v.
    """

    source: str
    exact: bool
    causal: bool
    peak: Callable[[Shape, torch.dtype, bool], int]
    flops: Callable[[Shape], int]
    call: Callable[[Shape], Callable]


def _sparse(name):
    return Method(
        {"Longformer": "Beltagy et al. 2020", "BigBird": "Zaheer et al. 2020"}[name], False, True,
        lambda s, dtype, kernels: flash_attention_bytes(s, s, dtype).peak if kernels else block_sparse_attention_bytes(
            s, s, _mask(name, s[2]), dtype, kernels=False).peak,  # the kernels take as much under any mask
        lambda s: _listed(name, s),
        lambda s: functools.partial(block_sparse_attention, mask=_mask(name, s[2]), kernel="tiled"))


def _projection(shape):
    return torch.full((min(K, shape[2]), shape[2]), 1 / shape[2], requires_grad=True)


def _in_tiles(shape, rows):
    """Count the FLOPs of a causal forward in tiles of `rows` queries, which take the keys up to their last query's."""
    B, H, T, D = shape
    return 4 * B * H * D * sum((end - first) * end for first, end in tiles((0, T), rows))


METHODS = {
    "standard": Method(
        "Vaswani et al. 2017", True, True,
        lambda s, dtype, kernels: reference_attention_bytes(
            s, s, dtype, causal=True, device="cuda" if kernels else "cpu").peak,
        lambda s: attention_flops(s, s).forward,  # of all pairs: those that are masked are computed, too
        lambda s: functools.partial(reference_attention, causal=True)),
    "memory-efficient": Method(
        "Rabe and Staats 2021", True, True,
        lambda s, dtype, kernels: memory_efficient_attention_bytes(s, s, dtype, causal=True).peak,
        lambda s: _in_tiles(s, 1024),
        lambda s: functools.partial(memory_efficient_attention, causal=True)),
    "flash": Method(
        "Dao et al. 2022, 2023", True, True,
        lambda s, dtype, kernels: (flash_attention_bytes if kernels else tiled_attention_bytes)(
            s, s, dtype, causal=True).peak,
        lambda s: _in_tiles(s, 128),
        lambda s: functools.partial(tiled_attention, causal=True)),
    "Longformer": _sparse("Longformer"),
    "BigBird": _sparse("BigBird"),
    "Linformer": Method(
        "Wang et al. 2020", False, False,
        lambda s, dtype, kernels: linformer_bytes(
            s, s, min(K, s[2]), dtype, share="kv",
            attention_bytes=flash_attention_bytes if kernels else tiled_attention_bytes).peak,
        lambda s: linformer_flops(s, s, min(K, s[2])).forward,
        lambda s: functools.partial(linformer_attention, e=_projection(s), attention=tiled_attention)),
    "linear": Method(
        "Katharopoulos et al. 2020; Yang et al. 2024", False, True,
        lambda s, dtype, kernels: delta_rule_bytes(s, s, dtype, kernel="triton" if kernels else "tiled").peak + 8,
        lambda s: delta_rule_flops(s, s),
        lambda s: functools.partial(gated_delta_rule, kernel="tiled")),
}


def closed(shape: Shape, dtype: torch.dtype = torch.float32, *, kernels: bool = False) -> dict[str, tuple[int, int]]:
    """Return {method: (bytes at the peak of a forward and backward, FLOPs of a forward)} for q, k, v of `shape`, (B, H,
    T, D). `kernels`: of the forms that run on a GPU. Masks and Linformer's E are not counted; gates are two numbers."""
    return {name: (method.peak(shape, dtype, kernels), method.flops(shape)) for name, method in METHODS.items()}


def exponent(few: float, many: float, times: float) -> float:
    """Return n of a cost that grows as the n-th power, from two readings at lengths that are `times` apart."""
    return math.log(many / few) / math.log(times)


class Choice(NamedTuple):
    """What `recommend` has found: of each method (bytes and seconds of the step, why not or "")."""

    tokens: int
    method: str | None
    considered: dict[str, tuple[int, float, str]]
    articles: str


def recommend(config: "GPTConfig", hardware: "Hardware", tokens: int, recall: Mapping[str, float], *,
              least: float = 0.95, worth: float = 1.25, utilisation: float = 0.4) -> Choice:
    """Return the Choice for one sequence of `tokens` in training on one GPU, of the methods that are causal, fit, and
    find at least the share `least` of old keys (`recall`). The fastest exact one is taken, unless another makes a
    step `worth` times as fast: what is not exact has to pay for what it loses.

    A step has 16 bytes a parameter, an input for each block, which is recomputed, one block's activations, and one
    layer's attention at its peak, with a head of keys for each of queries; the loss makes no logits. Its FLOPs are 8
    for each token and number of a matrix, and 4.5 forwards of attention, at `utilisation` of the GPU's peak. Methods
    that are exact find what "standard" finds. ValueError for a length below 1.
    """
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"tokens={tokens!r}: expected an int of at least 1")
    shape, considered = (1, config.heads, tokens, config.head_dim), {}
    block = sum(size for name, size in block_terms(config, 1, tokens, torch.bfloat16, "cuda").items()
                if name not in CORE)
    rest = model_state_bytes(config.parameter_count(), precision="bf16 + fp32 master").total + block
    rest += 2 * config.layers * tokens * config.hidden
    matrices = config.layers * sum(config.layer_parameters().values()) + config.vocab_size * config.hidden
    for name, method in METHODS.items():
        nbytes = rest + method.peak(shape, torch.bfloat16, True)
        # forward, forward again, backward: of a matrix 2, 2 and 4, of attention 1, 1 and 2.5 forwards
        flops = 8 * matrices * tokens + 4.5 * config.layers * method.flops(shape)
        found = recall["standard" if method.exact else name]
        considered[name] = nbytes, flops / (utilisation * hardware.bf16_flops), (
            "is not causal" if not method.causal else
            f"{nbytes / 2**30:,.0f} GiB" if nbytes > hardware.memory_bytes else
            f"finds {found:.0%}" if found < least else "")
    said = next(words for most, words in BANDS.items() if tokens < most)
    return Choice(tokens, _best(considered, worth), considered, said)


def _best(considered, worth):
    """Return the name of the fastest, an exact one unless another is `worth` times as fast; None if none is left."""
    # the last of equals: flash is as fast as standard by FLOPs, and takes less
    fitting = [name for name, (*_, why) in reversed(considered.items()) if not why]
    fastest, exact = (min((name for name in fitting if METHODS[name].exact >= only), default=None,
                          key=lambda name: considered[name][1]) for only in (False, True))
    return exact if exact and considered[exact][1] < worth * considered[fastest][1] else fastest


def table(readings: Mapping[str, Mapping[int, tuple[int, int]]], recall: Mapping[str, float]) -> str:
    """Return the articles' table as text: of each method the bytes and FLOPs that were read at each length, their
    exponents, how many old keys it finds, and its source; and the names that do not exist.

    - `readings`: {method: {tokens: (bytes, FLOPs)}} of one sequence in fp32, as the bench `which` takes them.
    """
    lengths = sorted(next(iter(readings.values())))
    few, many = lengths[0], lengths[-1]
    rows = []
    for i, (what, unit) in enumerate({"MiB at the peak": 2**20, "GFLOP of a forward": 1e9}.items()):
        rows.append([what, *(f"{T:,}" for T in lengths), "grows as"])
        for name in METHODS:
            read = {T: readings[name][T][i] for T in lengths}
            power = exponent(read[few], read[many], many / few)
            rows.append([name, *(f"{read[T] / unit:,.2f}" for T in lengths), f"T^{power:.2f}"])
        rows.append([""] * len(rows[0]))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [row[0].ljust(widths[0]) + "".join(cell.rjust(width + 2) for cell, width in zip(
        row[1:], widths[1:], strict=True)) for row in rows]
    lines.append(f"{'finds a key of 1,500 tokens ago':<34}source")
    for name, method in METHODS.items():
        found = recall.get("standard" if method.exact else name)
        said = "not read" if found is None else f"{found:.0%}" + ", not causal" * (not method.causal)
        lines.append(f"{name:<18}{said:<16}{method.source}")
    return "\n".join([*(line.rstrip() for line in lines), "",
                      *(f"{name} does not exist; there is {real}" for name, real in NEVER.items())])
