"""Models that the bench of ZeRO trains beside the GPT of the pages, 10 to 20 million parameters each; and what is alive
at the peak of a step: sizes that the allocator tells of, and what in a model has such a size.

A model takes (tokens, targets) and returns the mean loss. Those of transformers need a checkout and the test extra.
"""

import re
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from refimpl.zero.units import default_units, unit_buckets

from ..outside import kit

VOCABULARY, LARGE_VOCABULARY = 4096, 50_257
HIDDEN, LAYERS, HEADS, CONTEXT = 384, 6, 6, 64


class Block(nn.Module):
    """Attention and a gelu MLP, each with a LayerNorm before it."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        """Return the block's output, of x's shape (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SequentialGPT(nn.Module):
    """A GPT whose blocks are in nn.Sequential, and whose head has a weight of its own."""

    def __init__(self, vocabulary=VOCABULARY, hidden=HIDDEN, layers=LAYERS, heads=HEADS, context=CONTEXT):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens, targets):
        """Return the mean loss."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class WithLoss(nn.Module):
    """A model of transformers that takes (tokens, targets)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        """Return the mean loss."""
        return self.model(input_ids=tokens, labels=targets).loss


def _transformers(kind, **config):
    def build():
        *_, models = kit()
        return WithLoss(models.causal(kind, bos_token_id=None, eos_token_id=None, use_cache=False, **config)())

    return build


GPT2 = {"n_positions": CONTEXT, "n_layer": LAYERS, "n_head": HEADS}
TIED = "GPT-2 of transformers"
UNTIED = "Llama of transformers"
MODELS = {
    "GPT in nn.Sequential": SequentialGPT,
    TIED: _transformers("gpt2", vocab_size=VOCABULARY, n_embd=HIDDEN, **GPT2),
    UNTIED: _transformers("llama", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
                          num_attention_heads=HEADS, intermediate_size=1024, max_position_embeddings=CONTEXT),
    f"{TIED}, {LARGE_VOCABULARY:,} tokens": _transformers("gpt2", vocab_size=LARGE_VOCABULARY, n_embd=252, **GPT2)}


def available():
    """Return the names of the models that can be built here."""
    return [name for name in MODELS if MODELS[name] is SequentialGPT or kit() is not None]


# --- what is alive ---------------------------------------------------------------------------------------------------

LARGEST = 12  # sizes


def live_at_peak(events):
    """Return {bytes of a tensor: bytes of all of this size} of the largest that a region had taken at its highest
    moment, and not freed. `events` are those of `memory.measure`, on a CPU."""
    total = peak = last = 0
    for i, (_, nbytes) in enumerate(events):
        total += nbytes
        if total > peak:
            peak, last = total, i
    live = Counter()
    for _, nbytes in events[: last + 1]:
        live[abs(nbytes)] += nbytes
    return {f"{size:,}": nbytes for size, nbytes in live.most_common(LARGEST) if nbytes}


def names_of(model, world, rows, length):
    """Return {bytes: what has this size}: buckets of units, whole or as gradients, their shards, single parameters'
    gradients, and logits of so many rows of tokens. Layers of equal names but for a number are one. `model`: on any
    device. What is in no unit's or parameter's size is an activation, or a temporary tensor."""
    named, found = list(model.named_parameters()), {}

    def add(nbytes, what):
        names = found.setdefault(f"{nbytes:,}", [])
        names += [] if what in names else [what]

    for bucket in unit_buckets(named, default_units(model), world):
        add(bucket.nbytes, f"{_any(bucket.name)}, whole or its gradients")
        add(bucket.nbytes // world, f"a shard of {_any(bucket.name)}")
    for name, p in named:
        add(p.nbytes, f"gradient of {_any(name)}")
    for name, p in named:
        if p.dim() == 2 and "embed" not in name:
            add(rows * length * len(p) * p.itemsize, f"an activation of {len(p)} features")
    return {size: "; ".join(names) for size, names in found.items()}


def _any(name):
    return re.sub(r"\.\d+\b", ".*", name)
