"""What a way to attend costs in loss: a GPT of about 5 million parameters on real text, three seeds, 400 steps each.

Same weights at the start, same batches, same steps; the attention alone differs. Methods that compute the same numbers
(standard, memory-efficient, flash) are one row. Windows and blocks are an eighth of the sequence, so that they hide
something. Linformer has no row: it cannot be causal. It takes hours on a CPU.
"""

import functools
import statistics

import torch
from tqdm import tqdm

from refimpl.attention import (
    GatedDeltaAttention,
    NativeSparseAttention,
    bigbird_mask,
    in_each_layer,
    linear_attention,
    longformer_mask,
    sparse,
    tiled_attention,
)
from refimpl.data import VOCAB_SIZE, TextData
from refimpl.model import GPT, GPTConfig

from .record import row
from .runner import BAR_DELAY

CONFIG = GPTConfig(vocab_size=VOCAB_SIZE, context_length=512, layers=6, hidden=256, heads=4, norm="rmsnorm",
                   positions="rotary", bias=False)
BATCH, STEPS, SEEDS, RATE, HELD_OUT = 2, 400, (0, 1, 2), 1e-3, 8
WHOLE = "softmax over all keys"


def methods(config=CONFIG):
    """Return {name: function(model) that gives a GPT another attention, in each layer its own}."""
    part = config.context_length // 8
    return {
        WHOLE: lambda model: None,
        "Longformer": lambda model: sparse(model, lambda T: longformer_mask(T, part, 4, block=32), kernel="tiled"),
        "BigBird": lambda model: sparse(model, lambda T: bigbird_mask(T, 32, 32, 1, 0, block=32), kernel="tiled"),
        "native sparse": lambda model: in_each_layer(model, lambda: NativeSparseAttention(
            config.head_dim, block=32, top_k=max(3, part // 32), window=part, kernel="tiled")),
        "linear": lambda model: [block.attention.set_attention(functools.partial(linear_attention, kernel="tiled"))
                                 for block in model.blocks],
        "gated delta rule": lambda model: in_each_layer(
            model, lambda: GatedDeltaAttention(config.heads, config.head_dim, kernel="tiled")),
    }


def run(device="cpu", config=CONFIG, steps=STEPS, seeds=SEEDS):
    """Train each method with each seed: (settings, rows)."""
    return {"parameters": config.parameter_count(), "layers": config.layers, "hidden": config.hidden, "batch": BATCH,
            "tokens": config.context_length, "steps": steps, "seeds": list(seeds), "text": repr(TextData()),
            "optimizer": f"AdamW, {RATE}"}, rows(device, config, steps, seeds)


def rows(device, config, steps, seeds):
    """Yield a row for each method: the median over seeds of the loss on text that was not trained on."""
    text, whole = TextData(), None
    for name, give in tqdm(methods(config).items(), "methods", delay=BAR_DELAY, leave=False):
        losses = [trained(give, config, steps, seed, text, device) for seed in seeds]
        middle = statistics.median(losses)
        whole = middle if whole is None else whole
        yield row(f"loss after {steps} steps, {name}", WHOLE, "nats", middle, whole, method=name, by_seed=losses)


def trained(give, config, steps, seed, text, device):
    """Return the loss on held-out text after `steps`."""
    torch.manual_seed(seed)
    model = GPT(config, attention=tiled_attention)
    give(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    batches = text.batches(BATCH, config.context_length, seed=seed, device=device, epochs=100)
    for step, batch in zip(range(steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 40)
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = text.batches(BATCH, config.context_length, split="validation", device=device)
    with torch.no_grad():
        return statistics.fmean(float(model(*batch)) for batch, _ in zip(held_out, range(HELD_OUT), strict=False))
