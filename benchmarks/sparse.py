"""Block-sparse attention beside the dense form, and beside FlexAttention on the same mask, in one run.

What is listed is what is paid: the time over that of a dense attention is to be the share of blocks that are listed.
Masks are windows down to a sixteenth of the blocks, BigBird with its own blocks for each head, and packed
documents. On a CPU both are the forms in PyTorch, of tiles of 128; on a GPU the kernels. FlexAttention computes the
same mask, eager (a dense product that is masked afterwards) and compiled; its output has to be equal.
"""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from tqdm import tqdm

from refimpl.attention import (
    bigbird_mask,
    block_sparse_attention,
    documents_mask,
    flash_attention,
    longformer_mask,
    tiled_attention,
)

from .runner import BAR_DELAY, KernelTimer, compare

HEADS, HEAD_DIM, BLOCK = 16, 64, 128
LENGTHS = {"cpu": 4096, "cuda": 16384}
DENSE, OURS, EAGER, COMPILED = "dense", "block_sparse_attention", "flex_attention, eager", "flex_attention, compiled"
WITHIN = {"cpu": 1.3, "cuda": 1 / 0.85}  # times density · the dense form's time


def masks(T):
    """Return {name: BlockMask} for T tokens, from a half to a sixteenth of the blocks."""
    found = {f"window of {T // part:,}": longformer_mask(T, T // part - BLOCK) for part in (4, 8, 16)}
    found["window and globals"] = longformer_mask(T, BLOCK, BLOCK)
    found["BigBird, by head"] = bigbird_mask(T, BLOCK, BLOCK, 3, 0, heads=HEADS)
    found["documents, causal"] = documents_mask((torch.arange(T) // (T // 8))[None], causal=True)
    found["short documents"] = documents_mask((torch.arange(T) // (T // 16))[None])
    return found


def run(device="cpu", length=None, rounds=None):
    """Make all comparisons on `device`: (settings, rows)."""
    kind = torch.device(device).type
    T, dtype = length or LENGTHS[kind], {"cpu": torch.float32, "cuda": torch.bfloat16}[kind]
    settings = {"shape": {"batch": 1, "heads": HEADS, "tokens": T, "head_dim": HEAD_DIM}, "block": BLOCK,
                "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
                "held to": f"time ≤ {WITHIN[kind]:.2f} · share of blocks · the dense form's time"}
    return settings, rows(device, T, dtype, rounds or {"cpu": 3, "cuda": 15}[kind])


def rows(device, T, dtype, rounds):
    """Yield a row for each mask, pass and peer."""
    kind = torch.device(device).type
    timer = KernelTimer(device) if kind == "cuda" else None
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(1, HEADS, T, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(4))
    for name, mask in tqdm(masks(T).items(), "masks", delay=BAR_DELAY, leave=False):
        calls = candidates(kind, mask, device)
        wanted, close = calls[OURS](q, k, v), {"cpu": 1e-4, "cuda": 2e-2}[kind]
        for peer in calls.keys() & {EAGER, COMPILED}:
            torch.testing.assert_close(calls[peer](q, k, v), wanted, rtol=close, atol=close)
        del calls[EAGER]  # a dense product that is masked afterwards
        for direction, step in (("forward", _forward), ("forward and backward", _step)):
            peers = [DENSE, COMPILED][: 1 if kind == "cpu" and step is _step else None]  # no backward of it on a CPU
            peers = [peer for peer in peers if peer in calls]
            timing = compare({who: functools.partial(step, calls[who], q, k, v, gradient) for who in (OURS, *peers)},
                             rounds=rounds, warmup=1, title=f"{direction}, {name}", timer=timer)
            of_share = timing.paired(OURS, DENSE) / mask.tile_density
            held = {DENSE: {"over the share": of_share, "within": of_share <= WITHIN[kind]},
                    COMPILED: {"within": timing.paired(OURS, COMPILED) <= 1} if kind == "cuda" else {}}
            for peer in peers:
                yield timing.row(f"{direction}, {name}", OURS, peer, pairs=mask.density, blocks=mask.tile_density,
                                 **held[peer])


def candidates(kind, mask, device):
    """Return {name: function(q, k, v)} that compute the same mask, and the dense form."""
    form = "triton" if kind == "cuda" else "tiled"
    blocks = create_block_mask(_predicate(mask, device), None if mask.shape[0] == 1 else mask.shape[0],
                               None if mask.shape[1] == 1 else mask.shape[1], mask.T, mask.S, device=device,
                               BLOCK_SIZE=BLOCK)
    dense = flash_attention if kind == "cuda" else functools.partial(
        tiled_attention, query_tile=BLOCK, key_tile=BLOCK)
    found = {DENSE: dense, OURS: functools.partial(block_sparse_attention, mask=mask.to(device), kernel=form),
             EAGER: functools.partial(flex_attention, block_mask=blocks)}
    if kind == "cuda" or mask.shape[1] == 1:  # PyTorch 2.13's C++ for lists of each head does not compile
        found[COMPILED] = functools.partial(torch.compile(flex_attention), block_mask=blocks)
    return found


def _predicate(mask, device):
    """Return the mask for FlexAttention: of its dense booleans, which any predicate can be."""
    seen = mask.dense().to(device)
    batch, heads = mask.shape[:2]
    return lambda b, h, i, j: seen[b if batch > 1 else 0, h if heads > 1 else 0, i, j]


def _forward(call, q, k, v, gradient):
    with torch.no_grad():
        return call(q, k, v)


def _step(call, q, k, v, gradient):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(call(*inputs), inputs, gradient)
